//! From files on disk to packed rows, through the public interface alone.

mod cache;
mod corpus;
mod damage;
mod exact;
mod filters;
mod fixtures;
mod hub;
mod interop;
mod killed;
mod loader;
mod pack;
mod program;
mod shards;
mod sources;
mod tokenizer;
