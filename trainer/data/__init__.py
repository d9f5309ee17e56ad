"""From text to batches: token sets are made once, mapped into memory, and read in an order that is computed.

- `tokenize/`: the parallel, restartable command that writes a token set
- `tokenizer`, `byte_pairs`: text to ids and back; the fast engine where it is proven equal
- `index`, `shards`, `remote`, `cache`, `verified`: a token set on disk or in S3, checked, and windows gathered from it
- `order`: the keyed permutation that says which window stands at which position of a run

A token set is a folder or an S3 prefix: `index.json` (written last: it makes the set exist), `tokenizer.json` unless
the tokenizer is `bytes`, and for every split `<split>-00000.tok` (raw little-endian ids) with `<split>-00000.doc`
(int64 ends of the documents that end in this shard, counted in tokens from the shard's start). The shards of a split
are one long stream of ids; every document ends with the end-of-text id, and a document may go on in the next shard.
"""
