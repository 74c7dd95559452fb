//! What can go wrong between processes, and whose words tell it.

use std::ffi::NulError;

use super::{Backend, StoreAddress};
use crate::FunctionError;

/// Why a store or a group of ranks does not do what it was asked. Every kind names the rank that tells
/// it, as the output of many ranks often ends up in one log.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DistributedError {
    /// The store could not be opened or reached.
    #[error(
        "rank {rank} cannot {doing} at {address}: {message}. Is rank 0 running there, is the port free \
         and open between machines, and have all ranks the same MASTER_ADDR and MASTER_PORT?"
    )]
    Store {
        /// Who tells it.
        rank: usize,
        /// What was asked, such as `open the store`.
        doing: String,
        /// Where the store should be.
        address: StoreAddress,
        /// torch's words.
        message: String,
    },

    /// A name with a NUL byte.
    #[error("{what} {name:?} has a NUL byte; leave it out")]
    Name {
        /// What is named.
        what: &'static str,
        /// The name.
        name: String,
        /// Where the byte is.
        source: NulError,
    },

    /// The torch that is loaded has no such backend.
    #[error(
        "rank {rank} cannot use {backend}: the torch that is loaded has no {symbol}. {}",
        backend.remedy()
    )]
    NoBackend {
        /// Who tells it.
        rank: usize,
        /// The backend.
        backend: Backend,
        /// What was looked up in vain.
        symbol: String,
    },

    /// The rank could not become one of the group.
    #[error(
        "rank {rank} of {world} cannot join the group {name:?} of {backend}: {message}. Have all \
         ranks been started, and can their machines reach each other?"
    )]
    Join {
        /// Who tells it.
        rank: usize,
        /// How many there are.
        world: usize,
        /// The group's name.
        name: String,
        /// Its backend.
        backend: Backend,
        /// torch's words.
        message: String,
    },

    /// A collective operation failed: often because another rank has ended.
    #[error(
        "rank {rank} of {world}: {operation} failed: {message}. Most often another rank has ended or \
         hangs: what it said last tells why"
    )]
    Collective {
        /// Who tells it.
        rank: usize,
        /// How many there are.
        world: usize,
        /// The operation.
        operation: &'static str,
        /// torch's words.
        message: String,
    },

    /// The loaded torch is not the one that this was compiled for.
    #[error(transparent)]
    TorchVersion(#[from] FunctionError),
}
