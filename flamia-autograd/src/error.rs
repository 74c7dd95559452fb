//! What can go wrong in a custom function.

use std::error::Error;

use tch::TchError;

/// Why a [`Function`](crate::Function) could not be applied or differentiated.
///
/// From a forward it is returned by [`apply`](crate::apply) as it is. A backward runs inside
/// torch's engine, so its error reaches the caller of `f_backward` as the text of a
/// [`TchError::Torch`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// The function's own complaint.
    #[error(transparent)]
    Custom(Box<dyn Error + Send + Sync>),

    /// A tensor operation failed inside the function.
    #[error(transparent)]
    Torch(#[from] TchError),

    /// The function panicked. The panic stops here; the process and the graph stay usable.
    #[error("{pass} of {function} panicked: {message}")]
    Panic {
        /// The function's name.
        function: String,
        /// `forward` or `backward`.
        pass: &'static str,
        /// The panic's own text.
        message: String,
    },

    /// The forward returned no tensor, so there is nothing to differentiate.
    #[error("forward of {function} returned no output; return at least one tensor")]
    NoOutputs {
        /// The function's name.
        function: String,
    },

    /// The forward returned a tensor that torch calls undefined.
    #[error("output {index} of {function} is an undefined tensor")]
    UndefinedOutput {
        /// The function's name.
        function: String,
        /// Which output.
        index: usize,
    },

    /// `mark_non_differentiable` named an output that does not exist.
    #[error(
        "{function} marked output {index} as non-differentiable but returned {outputs} output(s)"
    )]
    NoSuchOutput {
        /// The function's name.
        function: String,
        /// The index that was marked.
        index: usize,
        /// How many outputs there are.
        outputs: usize,
    },

    /// The forward changed an input in place, which the graph would not know of.
    #[error("forward of {function} modified input {index} in place; work on a copy")]
    InputModified {
        /// The function's name.
        function: String,
        /// Which input.
        index: usize,
    },

    /// The backward returned the wrong number of gradients.
    #[error(
        "returned {found} gradient(s) for {expected} input(s); return one entry per input, None where there is no gradient"
    )]
    GradientCount {
        /// How many inputs the forward had, absent ones included.
        expected: usize,
        /// How many entries the backward returned.
        found: usize,
    },

    /// torch refused to enter the outputs in its graph.
    #[error("cannot attach {function} to the graph: {message}")]
    Attach {
        /// The function's name.
        function: String,
        /// torch's reason.
        message: String,
    },

    /// The libtorch that was loaded is not the one that the bindings were compiled for.
    #[error(
        "compiled for torch {wanted} but torch {found} was loaded; check LD_LIBRARY_PATH, or rebuild with LIBTORCH pointing at the torch that is used"
    )]
    TorchVersion {
        /// `major.minor` that the C++ side was compiled for.
        wanted: &'static str,
        /// The version of the loaded library.
        found: String,
    },
}

impl FunctionError {
    /// An error of the function's own: a text, or any error type.
    pub fn custom(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Custom(error.into())
    }
}
