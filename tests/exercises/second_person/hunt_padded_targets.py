"""Answers to hunt_padded_targets, written from its text by a second person."""

import torch

PAD, IGNORE = 0, -100


def row(real, length, pad_labels=IGNORE, mask=None, labels=None):
    """Right with its defaults: a row from the tokens that fit into it."""
    fill = length - len(real)
    return {
        "input_ids": torch.tensor(real + [PAD] * fill, dtype=torch.int64),
        "attention_mask": torch.tensor(mask or [1] * len(real) + [0] * fill, dtype=torch.int64),
        "labels": torch.tensor(labels or real + [pad_labels] * fill, dtype=torch.int64),
    }


def cut_and_filled(ids, length):
    """Right: from columns instead of lists."""
    n = min(len(ids), length)
    real = torch.arange(length) < n
    input_ids = torch.full((length,), PAD)
    input_ids[:n] = torch.tensor(ids[:n])
    labels = torch.where(real, input_ids, IGNORE)
    return {"input_ids": input_ids, "attention_mask": real.long(), "labels": labels}


def padding_found_by_its_id(ids, length):
    out = row(ids[:length], length)
    real = out["input_ids"] != PAD
    out["labels"] = out["input_ids"].masked_fill(~real, IGNORE)
    out["attention_mask"] = real.long()
    return out


def labels_found_by_id(ids, length):
    out = row(ids[:length], length)
    out["labels"][out["input_ids"] == PAD] = IGNORE
    return out


def mask_found_by_id(ids, length):
    out = row(ids[:length], length)
    out["attention_mask"] = (out["input_ids"] != PAD).long()
    return out


def only_the_mask_mended(ids, length):
    return row(ids[:length], length, pad_labels=PAD)


def only_the_labels_mended(ids, length):
    return row(ids[:length], length, mask=[1] * length)


def labels_shifted(ids, length):
    real = ids[:length]
    return row(real, length, labels=real[1:] + [IGNORE] * (length - len(real) + 1))


def one_padding_taught_as_the_end(ids, length):
    real = ids[:length]
    labels = (real + [PAD] + [IGNORE] * length)[:length]
    return row(real, length, labels=labels)


def last_tokens_kept(ids, length):
    return row(ids[-length:], length)


def filled_up_on_the_left(ids, length):
    real = ids[:length]
    fill = length - len(real)
    return {
        "input_ids": torch.tensor([PAD] * fill + real),
        "attention_mask": torch.tensor([0] * fill + [1] * len(real)),
        "labels": torch.tensor([IGNORE] * fill + real),
    }


def list_of_the_caller_filled_up(ids, length):
    out = row(ids[:length], length)
    while len(ids) < length:
        ids.append(PAD)
    return out


def never_cut(ids, length):
    return row(list(ids), max(length, len(ids)))


def counted_before_the_cut(ids, length):
    out = row(ids[:length], length)
    n = len(ids) - length
    out["labels"][n:] = IGNORE
    out["attention_mask"][n:] = 0
    return out


def labels_and_ids_share_memory(ids, length):
    out = row(ids[:length], length)
    labels = out["input_ids"]
    labels[len(ids) :] = IGNORE
    return out | {"labels": labels}


def mask_of_booleans(ids, length):
    out = row(ids[:length], length)
    return out | {"attention_mask": out["attention_mask"].bool()}


def mask_upside_down(ids, length):
    out = row(ids[:length], length)
    return out | {"attention_mask": 1 - out["attention_mask"]}


def padding_of_zero_in_the_labels(ids, length):
    out = row(ids[:length], length)
    return out | {"labels": out["input_ids"] * out["attention_mask"]}


def minus_one_ignored(ids, length):
    return row(ids[:length], length, pad_labels=-1)


def last_token_without_label(ids, length):
    out = row(ids[:length], length)
    out["labels"][min(len(ids), length) - 1 :] = IGNORE
    return out


def lists_returned(ids, length):
    return {name: x.tolist() for name, x in row(ids[:length], length).items()}


ANSWERS = {
    padding_found_by_its_id: "padding is recognised by its id, which the text may contain too",
    labels_found_by_id: "the labels are made from the ids, and leave out a real token",
    mask_found_by_id: "the mask is made from the ids, and hides a real token",
    only_the_mask_mended: "the mask is repaired, and padding is still a label",
    only_the_labels_mended: "the labels are repaired, and the mask is still all ones",
    labels_shifted: "the labels are shifted here, and once more in the loss",
    one_padding_taught_as_the_end: (
        "the first padding token is still a label, as an end of the text"
    ),
    last_tokens_kept: "a long text keeps its last tokens",
    filled_up_on_the_left: "the padding is on the left",
    list_of_the_caller_filled_up: "the list of the caller is filled up",
    never_cut: "a long text is not cut",
    counted_before_the_cut: "",
    labels_and_ids_share_memory: "input_ids and labels are one tensor: -100 is in both",
    mask_of_booleans: "the mask is bool",
    mask_upside_down: "the mask is 1 for padding",
    padding_of_zero_in_the_labels: "the mask is repaired, and padding is still a label",
    minus_one_ignored: "the labels of padding are -1, which the loss does not know",
    last_token_without_label: "the last token of the text is left out",
    lists_returned: "",
}
RIGHT = [cut_and_filled]
