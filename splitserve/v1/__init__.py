"""Generated from protos/splitserve/v1 by `make proto`; never edited by hand."""
