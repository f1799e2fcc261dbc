# The tasks stand in make.py, which runs without make as well: python make.py
.DEFAULT_GOAL := help
# The first that starts, the one asked for before all; it also makes the environment.
PYTHON3 := $(shell for name in "$(PYTHON)" python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$name" -c "" 2>/dev/null && { echo "$$name"; break; }; done)

%: always
	@"$(or $(PYTHON3),$(error Python 3.11 or newer is needed))" make.py $@

.PHONY: always
always Makefile make.py: ;
