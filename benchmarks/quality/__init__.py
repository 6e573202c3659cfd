"""What packing the cache does to a model: ours and other codecs, on the same tokens, with bits as stored."""
