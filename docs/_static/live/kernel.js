/* The two products of a model again, byte by byte, as functions of WebAssembly that multiply four pairs of
 * numbers with one instruction: y = W x, for all matrices and for the scores of attention, and y = x W, for
 * its weighted sums of values.
 *
 * A vector has four lanes, a float32 in each. In `lm.multiply` a row has four sums, a, b, c and d: here
 * they are the lanes of one vector, and four rows are summed side by side. So the order of the additions
 * is the same, but each is rounded to float32. A browser that has no such instructions, or may not run
 * them, goes on with the loops of `lm.multiply` and `lm.attention`.
 */
"use strict";

(function () {
  const [I32, F32X4, FUNCTION, NOTHING] = [0x7f, 0x7b, 0x60, 0x40]; // types, as bytes
  // Locals by number: six parameters, all in bytes, then what the function makes of them. A row of W is `row`
  // long, and `stride` leads to the next one: between the keys of a head are those of other heads.
  const [X, W, Y, ROW, STRIDE, END, COLUMN, W1, W2, W3, PART, SUM] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

  /* sum += part * (the four weights of this row, from `column` on) */
  const addProducts = (sum, row) => [
    0x20, sum, //              local.get $sum
    0x20, PART, //             local.get $part
    0x20, row, //              local.get $row       where the row begins
    0x20, COLUMN, //           local.get $column
    0x6a, //                   i32.add
    0xfd, 0x00, 0x04, 0x00, // v128.load            four weights
    0xfd, 0xe6, 0x01, //       f32x4.mul            four products
    0xfd, 0xe4, 0x01, //       f32x4.add            four sums
    0x21, sum, //              local.set $sum
  ];

  /* y[k] = a + b + c + d */
  const addLanes = (sum, k) => [
    0x20, Y, //                local.get $y
    0x20, sum, //              local.get $sum
    0xfd, 0x1f, 0, //          f32x4.extract_lane 0
    0x20, sum, //              local.get $sum
    0xfd, 0x1f, 1, //          f32x4.extract_lane 1
    0x92, //                   f32.add
    0x20, sum, //              local.get $sum
    0xfd, 0x1f, 2, //          f32x4.extract_lane 2
    0x92, //                   f32.add
    0x20, sum, //              local.get $sum
    0xfd, 0x1f, 3, //          f32x4.extract_lane 3
    0x92, //                   f32.add
    0x38, 0x02, 4 * k, //      f32.store offset=4k
  ];

  /* to = from + number of bytes */
  const further = (to, from, bytes) => [
    0x20, from, //             local.get $from
    ...bytes, //               local.get $stride, or i32.const
    0x6a, //                   i32.add
    0x21, to, //               local.set $to
  ];
  const aRow = [0x20, STRIDE]; // local.get $stride
  const sixteen = [0x41, 16]; // i32.const 16

  const linear = [
    0x03, NOTHING, //          loop                 four rows of W
    ...further(W1, W, aRow),
    ...further(W2, W1, aRow),
    ...further(W3, W2, aRow),
    0x41, 0, //                  i32.const 0
    0x21, COLUMN, //             local.set $column
    0x43, 0, 0, 0, 0, //         f32.const 0
    0xfd, 0x13, //               f32x4.splat        0 in all four lanes
    0x22, SUM, //                local.tee $sum
    0x22, SUM + 1, //            local.tee $sum1
    0x22, SUM + 2, //            local.tee $sum2
    0x21, SUM + 3, //            local.set $sum3
    0x03, NOTHING, //            loop               four columns
    0x20, X, //                    local.get $x
    0x20, COLUMN, //               local.get $column
    0x6a, //                       i32.add
    0xfd, 0x00, 0x04, 0x00, //     v128.load        four numbers of x
    0x21, PART, //                 local.set $part
    ...addProducts(SUM, W),
    ...addProducts(SUM + 1, W1),
    ...addProducts(SUM + 2, W2),
    ...addProducts(SUM + 3, W3),
    ...further(COLUMN, COLUMN, sixteen),
    0x20, COLUMN, //               local.get $column
    0x20, ROW, //                  local.get $row
    0x49, //                       i32.lt_u
    0x0d, 0, //                    br_if 0          again, while column < row
    0x0b, //                     end
    ...addLanes(SUM, 0),
    ...addLanes(SUM + 1, 1),
    ...addLanes(SUM + 2, 2),
    ...addLanes(SUM + 3, 3),
    ...further(W, W3, aRow),
    ...further(Y, Y, sixteen),
    0x20, Y, //                  local.get $y
    0x20, END, //                local.get $end
    0x49, //                     i32.lt_u
    0x0d, 0, //                  br_if 0            again, while y < end
    0x0b, //                   end
    0x0b, //                 end of the function
  ];

  /* y = x W, four columns of it: the number of x that belongs to a row of W goes into all lanes. */
  const TOTAL = 6; // the first local after the parameters, 0 when the function begins
  const weighted = [
    0x03, NOTHING, //          loop                 a row of W
    0x20, TOTAL, //              local.get $total
    0x20, X, //                  local.get $x
    0xfd, 0x09, 0x02, 0x00, //   v128.load32_splat  a number of x, four times
    0x20, W, //                  local.get $w
    0xfd, 0x00, 0x04, 0x00, //   v128.load          four columns
    0xfd, 0xe6, 0x01, //         f32x4.mul
    0xfd, 0xe4, 0x01, //         f32x4.add
    0x21, TOTAL, //              local.set $total
    ...further(W, W, aRow),
    ...further(X, X, [0x41, 4]), // i32.const 4
    0x20, X, //                  local.get $x
    0x20, END, //                local.get $end
    0x49, //                     i32.lt_u
    0x0d, 0, //                  br_if 0            again, while x < end
    0x0b, //                   end
    0x20, Y, //                local.get $y
    0x20, TOTAL, //            local.get $total
    0xfd, 0x0b, 0x04, 0x00, // v128.store
    0x0b, //                 end of the function
  ];

  // A module is a list of sections: a number that says what it is, its length, and its content.
  const sized = (bytes) => [...length(bytes.length), ...bytes];
  const length = (n) => (n < 128 ? [n] : [(n % 128) + 128, ...length(Math.floor(n / 128))]);
  const section = (number, ...bytes) => [number, ...sized(bytes)];
  const name = (text) => sized([...text].map((letter) => letter.charCodeAt(0)));

  const bytes = Uint8Array.of(
    ...[0x00, 0x61, 0x73, 0x6d, 1, 0, 0, 0], // "\0asm", version 1
    ...section(1, 1, FUNCTION, 6, I32, I32, I32, I32, I32, I32, 0), // one type: six numbers in, none out
    ...section(2, 1, ...name("lm"), ...name("memory"), 2, 0, 1), // a memory comes from outside
    ...section(3, 2, 0, 0), // two functions, of type 0
    ...section(7, 2, ...name("linear"), 0, 0, ...name("weighted"), 0, 1), // both are visible outside
    ...section(10, 2, ...sized([2, 4, I32, 5, F32X4, ...linear]), // four more integers, five vectors
      ...sized([1, 1, F32X4, ...weighted])), // one vector
  );

  const holders = new WeakMap(); // by memory, as a buffer: what multiplies there

  /* A memory of its own for the matrices (O, I) of a model, and a row of x and of y. It cannot grow, so the
   * tensors become views of it: there is no copy that could be out of date. */
  function place(module, tensors) {
    const fits = ({ shape, data }) => shape.length === 2 && shape[1] % 4 === 0 && data instanceof Float32Array;
    const matrices = [...new Set(Object.values(tensors))].filter(fits);
    if (!matrices.length) return;
    const [widest, tallest] = [1, 0].map((axis) => Math.max(...matrices.map(({ shape }) => upToFour(shape[axis]))));
    const sizes = matrices.map(({ shape: [O, I] }) => upToFour(O) * I); // O is filled up with rows of 0
    const numbers = sizes.reduce((a, b) => a + b, widest + tallest);
    const pages = Math.ceil((4 * numbers) / 65536);
    const memory = new WebAssembly.Memory({ initial: pages, maximum: pages });
    const all = new Float32Array(memory.buffer);
    const { linear } = new WebAssembly.Instance(module, { lm: { memory } }).exports;
    let at = widest + tallest;
    matrices.forEach((tensor, i) => {
      const data = all.subarray(at, at + tensor.data.length);
      data.set(tensor.data);
      tensor.data = data;
      at += sizes[i];
    });
    holders.set(memory.buffer, (x, { shape: [O, I], data }, y) => {
      for (let t = 0; t * O < y.length; t++) {
        all.set(x.subarray(t * I, (t + 1) * I));
        linear(0, data.byteOffset, 4 * widest, 4 * I, 4 * I, 4 * (widest + O));
        y.set(all.subarray(widest, widest + O), t * O);
      }
    });
  }

  /* The products of attention.js. Keys and values (S, width) are copied to a memory for all models, behind a
   * query or a row of y (D) and the scores or weights (S). Undefined where they do not fit. */
  function attend({ all, linear, weighted }, k, v, width, D) {
    const atK = D + upToFour(k.length / width);
    const atV = atK + k.length;
    if (!(k instanceof Float32Array) || D % 4 || atV + v.length + 3 * width > all.length) return undefined;
    all.set(k, atK);
    all.set(v, atV);
    return {
      scores(q, from, scale, scores) {
        all.set(q);
        linear(0, 4 * (atK + from), 4 * D, 4 * D, 4 * width, 4 * (D + scores.length));
        for (let s = 0; s < scores.length; s++) scores[s] = all[D + s] * scale;
      },
      sum(weights, from, y) {
        all.set(weights, D);
        const end = 4 * (D + weights.length);
        for (let d = 0; d < 4 * D; d += 16) weighted(4 * D, 4 * (atV + from) + d, d, 0, 4 * width, end);
        y.set(all.subarray(0, D));
      },
    };
  }

  const upToFour = (n) => 4 * Math.ceil(n / 4);

  /* What runs the kernel, or null: trying tells, and `?kernel=plain` asks for null. Where a model finds no
   * memory, its tensors stay as they are. */
  function build() {
    if (new URLSearchParams(location.search).get("kernel") === "plain") return null;
    try {
      const module = new WebAssembly.Module(bytes);
      const memory = new WebAssembly.Memory({ initial: 16, maximum: 16 }); // a megabyte
      const work = { all: new Float32Array(memory.buffer), ...new WebAssembly.Instance(module, { lm: { memory } }).exports };
      return {
        bytes,
        attend: (...given) => attend(work, ...given),
        place(tensors) {
          try {
            place(module, tensors);
          } catch (error) {
            if (!(error instanceof RangeError)) throw error;
          }
        },
        of: ({ data }) => holders.get(data.buffer),
      };
    } catch {
      return null;
    }
  }
  lm.kernel = build();
})();
