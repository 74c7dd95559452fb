//! What can be wrong with a call.

use crate::options::Exponential;

/// Why an attention call was refused. Nothing was computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AttentionError {
    /// A tensor's shape does not fit the others.
    #[error(
        "{tensor} has shape {found:?}, expected {expected:?} ([rows, heads, head_dim], from q and k)"
    )]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// Shape that the other tensors ask for.
        expected: [usize; 3],
        /// Its shape.
        found: [usize; 3],
    },
    /// A view reaches past its buffer.
    #[error(
        "{tensor} with shape {shape:?} and strides {strides:?} needs {needed} elements, but its buffer has {available}"
    )]
    Buffer {
        /// Which tensor.
        tensor: &'static str,
        /// Shape of the view.
        shape: [usize; 4],
        /// Strides of the view, in elements.
        strides: [usize; 4],
        /// Elements needed.
        needed: usize,
        /// Elements there.
        available: usize,
    },
    /// The query heads cannot be shared out among the key/value heads.
    #[error(
        "{heads} query heads cannot share {kv_heads} key/value heads evenly: use a multiple of {kv_heads}"
    )]
    Heads {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
    },
    /// No kernel for this head dimension.
    #[error("head dimension {head_dim} is not supported: use one of {supported:?}")]
    HeadDim {
        /// Asked for.
        head_dim: usize,
        /// What there is.
        supported: &'static [usize],
    },
    /// The documents do not cover the rows.
    #[error("the documents cover {documents} rows, but the tensors have {rows}")]
    Documents {
        /// Rows that the documents cover.
        documents: usize,
        /// Rows of the tensors.
        rows: usize,
    },
    /// A document lies in two sequences of a batched tensor.
    #[error(
        "document {document} (rows {start} to {end}) crosses a batch boundary: sequences have {length} rows each"
    )]
    CrossesBatch {
        /// Index of the document.
        document: usize,
        /// Its first row.
        start: usize,
        /// One past its last row.
        end: usize,
        /// Rows per sequence.
        length: usize,
    },
    /// Probabilities would saturate.
    #[error(
        "c + tau = {c} + {tau} exceeds log2(448) = 8.807: probabilities would saturate silently; lower one of them"
    )]
    Saturates {
        /// Power of two on the probabilities.
        c: i32,
        /// Slack of the running maximum.
        tau: f32,
    },
    /// An option outside its range.
    #[error("{option} = {value} is out of range: {range}")]
    OutOfRange {
        /// Name of the option.
        option: &'static str,
        /// Its value.
        value: f64,
        /// What is allowed.
        range: &'static str,
    },
    /// Options that do not go together.
    #[error("{what} does not go with {with}: {instead}")]
    Combination {
        /// The option.
        what: String,
        /// What it does not go with.
        with: String,
        /// What to do.
        instead: &'static str,
    },
    /// An approximate exponential in a call that is differentiated.
    #[error(
        "the {exponential} exponential is for inference only: the backward pass rebuilds the \
         forward's probabilities, and would have to approximate them the same way, which costs more \
         than the forward gains; train with `exact` or `polynomial`"
    )]
    InferenceOnly {
        /// The exponential asked for.
        exponential: Exponential,
    },
    /// No such option value.
    #[error("{what} {name:?} is not known: use one of {known:?}")]
    UnknownName {
        /// Name of the option.
        what: &'static str,
        /// Value given.
        name: String,
        /// Values there are.
        known: &'static [&'static str],
    },
}
