//! Named f32 tensors to and from safetensors bytes. Loading is all or nothing.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView, View, serialize};
use tch::{Kind, TchError, Tensor, no_grad};

use super::CheckpointError;
use super::files::io;

/// One tensor that keeps a file from being loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensorProblem {
    /// The model has it, the file does not.
    Missing {
        /// Its name.
        name: String,
    },
    /// The file has it, the model does not.
    Unexpected {
        /// Its name.
        name: String,
    },
    /// Both have it, in different shapes. Nothing is broadcast.
    Shape {
        /// Its name.
        name: String,
        /// The model's.
        expected: Vec<i64>,
        /// The file's.
        found: Vec<i64>,
    },
    /// The file's is of a type that is not read. Checkpoints, with master weights and moments, are
    /// f32; nothing is converted.
    Dtype {
        /// Its name.
        name: String,
        /// The types that are read.
        expected: &'static str,
        /// The file's type.
        found: String,
    },
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { name } => write!(f, "{name} is missing"),
            Self::Unexpected { name } => write!(f, "{name} is not part of the model"),
            Self::Shape {
                name,
                expected,
                found,
            } => {
                write!(
                    f,
                    "{name} is {found:?} in the file and {expected:?} in the model"
                )
            }
            Self::Dtype {
                name,
                expected,
                found,
            } => write!(f, "{name} is {found}, but must be {expected}"),
        }
    }
}

/// The first few problems in words, and how many more there are.
pub(super) fn list(problems: &[TensorProblem]) -> String {
    const SHOWN: usize = 6;
    let mut lines: Vec<String> = problems
        .iter()
        .take(SHOWN)
        .map(TensorProblem::to_string)
        .collect();
    if problems.len() > SHOWN {
        lines.push(format!("and {} more", problems.len() - SHOWN));
    }
    lines.join("; ")
}

/// The safetensors file that holds `tensors`. The same tensors give the same bytes.
///
/// # Errors
/// [`CheckpointError`] naming `path` when a tensor cannot be read.
pub fn write_tensors<'a>(
    tensors: impl IntoIterator<Item = (String, &'a Tensor)>,
    path: &Path,
) -> Result<Vec<u8>, CheckpointError> {
    let failure = RefCell::new(None);
    let values = tensors.into_iter().map(|(name, tensor)| {
        let shape = tensor.size().iter().map(|&n| n as usize).collect();
        let values = Values {
            tensor,
            shape,
            failure: &failure,
        };
        (name, values)
    });
    // Hugging Face's loaders ask for this entry.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let file = serialize(values, Some(metadata));
    if let Some(source) = failure.into_inner() {
        return Err(CheckpointError::Torch {
            path: path.into(),
            source,
        });
    }
    file.map_err(|source| CheckpointError::NotSafetensors {
        path: path.into(),
        source,
    })
}

/// A tensor whose bytes are copied when the file takes them in, so that a large model is in memory once more
/// and not twice.
struct Values<'a> {
    tensor: &'a Tensor,
    shape: Vec<usize>,
    /// The first failure of any tensor, which `View` cannot return.
    failure: &'a RefCell<Option<TchError>>,
}

impl View for Values<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = little_endian(self.tensor).unwrap_or_else(|error| {
            self.failure.borrow_mut().get_or_insert(error);
            Vec::new()
        });
        bytes.into()
    }

    fn data_len(&self) -> usize {
        4 * self.tensor.numel()
    }
}

/// Copies the tensors of the file `path` into `targets`, which keep their device.
///
/// # Errors
/// [`CheckpointError::Mismatch`] lists every missing, unexpected, misshapen or mistyped tensor, and
/// then no target has changed.
pub fn load_tensors<'a>(
    targets: impl IntoIterator<Item = (String, &'a Tensor)>,
    path: &Path,
) -> Result<(), CheckpointError> {
    let bytes = fs::read(path).map_err(io("read", path))?;
    let file =
        SafeTensors::deserialize(&bytes).map_err(|source| CheckpointError::NotSafetensors {
            path: path.into(),
            source,
        })?;
    let targets: BTreeMap<String, &Tensor> = targets.into_iter().collect();
    let mut found: BTreeMap<String, TensorView<'_>> = file.tensors().into_iter().collect();

    let mut problems = Vec::new();
    let mut copies = Vec::new();
    for (name, target) in targets {
        let Some(view) = found.remove(&name) else {
            problems.push(TensorProblem::Missing { name });
            continue;
        };
        let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
        if view.dtype() != Dtype::F32 {
            problems.push(TensorProblem::Dtype {
                name,
                expected: "F32",
                found: format!("{:?}", view.dtype()),
            });
        } else if shape != target.size() {
            problems.push(TensorProblem::Shape {
                name,
                expected: target.size(),
                found: shape,
            });
        } else {
            copies.push((target, view));
        }
    }
    problems.extend(
        found
            .into_keys()
            .map(|name| TensorProblem::Unexpected { name }),
    );
    if !problems.is_empty() {
        return Err(CheckpointError::Mismatch {
            path: path.into(),
            problems,
        });
    }
    no_grad(|| {
        copies.into_iter().try_for_each(|(target, view)| {
            let values: Vec<f32> = view
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect();
            target
                .shallow_clone()
                .f_copy_(&Tensor::f_from_slice(&values)?.f_reshape(target.size())?)
        })
    })
    .map_err(|source| CheckpointError::Torch {
        path: path.into(),
        source,
    })
}

fn little_endian(tensor: &Tensor) -> Result<Vec<u8>, TchError> {
    let tensor = tensor
        .f_detach()?
        .f_to_device(tch::Device::Cpu)?
        .f_contiguous()?;
    if tensor.f_kind()? != Kind::Float {
        return Err(TchError::Kind(format!(
            "expected f32, found {:?}",
            tensor.f_kind()?
        )));
    }
    let count = tensor.numel();
    let mut bytes = vec![0; 4 * count];
    tensor.f_copy_data_u8(&mut bytes, count)?;
    if cfg!(target_endian = "big") {
        bytes.chunks_exact_mut(4).for_each(<[u8]>::reverse);
    }
    Ok(bytes)
}
