//! Why nothing was simulated.

use std::io;
use std::path::PathBuf;

use flamia_sched::DocumentsError;
use flamia_train::atomic::WriteError;
use flamia_train::plot::PlotError;

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
pub enum SchedError {
    /// A file of lengths that cannot be read.
    #[error("cannot read the document lengths in {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// Something in a file of lengths that is no length.
    #[error(
        "{}:{line}: `{found}` is no document length: give whole numbers of tokens, separated by \
         blanks or lines, with comments behind a #", path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What stands there.
        found: String,
    },
    /// A file without a single length.
    #[error("{} holds no document length", path.display())]
    NoLengths {
        /// The file.
        path: PathBuf,
    },
    /// Documents that fit no packed row.
    #[error(transparent)]
    Documents(#[from] DocumentsError),
    /// Fewer rows than one step takes.
    #[error(
        "the documents fill {found} rows of {row_tokens} tokens, and a step of {ranks} ranks with \
         {rows_per_rank} rows each takes {wanted}: give more documents, or shorter rows with \
         --row-tokens", wanted = ranks * rows_per_rank
    )]
    TooFewRows {
        /// Rows that there are.
        found: usize,
        /// Tokens of a row.
        row_tokens: usize,
        /// Ranks of the global batch.
        ranks: usize,
        /// Rows each of them takes.
        rows_per_rank: usize,
    },
    /// A policy of the other pass.
    #[error("`{policy}` is how the backward pass is launched: add --pass backward")]
    BackwardOnly {
        /// Its name.
        policy: String,
    },
    /// More than a drawing shows.
    #[error(
        "--svg draws one row of documents on one GPU, and {rows} rows on {sms} numbers of SMs were \
         asked for: choose with --workload and --sms"
    )]
    TooMuchToDraw {
        /// Rows of documents.
        rows: usize,
        /// Numbers of SMs.
        sms: usize,
    },
    /// Rows that cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A drawing that cannot be made or written.
    #[error(transparent)]
    Plot(#[from] PlotError),
}
