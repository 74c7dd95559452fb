//! From files on disk to packed rows, through the public interface alone.

mod corpus;
mod damage;
mod fixtures;
mod loader;
mod pack;
mod shards;
mod tokenizer;
