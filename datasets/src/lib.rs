//! FineWeb-Edu shards to packed rows of tokens.
