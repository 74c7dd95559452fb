//! Weights as Hugging Face's files hold them: F32 narrowed on the way out, widened on the way in.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::View;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use tch::{Tensor, no_grad};

use super::config::entry;
use super::{HuggingFaceError, INDEX, WEIGHTS, io, read_json};
use crate::checkpoint::{CheckpointError, TensorProblem};
use crate::model::{ModelShape, Params};

/// The types that weights are widened from.
const READ: &str = "F32, BF16 or F16";

/// Of old exports: frequencies that follow from the configuration.
const FREQUENCIES: &str = "rotary_emb.inv_freq";

/// What weights are exported in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportType {
    /// BF16, rounded to the nearest, ties to even: what models are run in.
    #[default]
    Bf16,
    /// FP32, the bits that were trained.
    F32,
}

impl ExportType {
    /// torch's name for it.
    pub fn torch(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat16",
            Self::F32 => "float32",
        }
    }
}

impl fmt::Display for ExportType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

/// An F32 tensor that is narrowed when it is written, so that one narrowed tensor is held at a time.
struct Written<'a> {
    view: TensorView<'a>,
    as_type: ExportType,
}

impl View for Written<'_> {
    fn dtype(&self) -> Dtype {
        match self.as_type {
            ExportType::Bf16 => Dtype::BF16,
            ExportType::F32 => Dtype::F32,
        }
    }

    fn shape(&self) -> &[usize] {
        self.view.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.view.data();
        match self.as_type {
            ExportType::F32 => bytes.into(),
            ExportType::Bf16 => widened::<4>(bytes, f32::from_le_bytes)
                .flat_map(|value| bf16::from_f32(value).to_le_bytes())
                .collect::<Vec<u8>>()
                .into(),
        }
    }

    fn data_len(&self) -> usize {
        match self.as_type {
            ExportType::F32 => self.view.data().len(),
            ExportType::Bf16 => self.view.data().len() / 2,
        }
    }
}

fn widened<const BYTES: usize>(
    bytes: &[u8],
    value: impl Fn([u8; BYTES]) -> f32,
) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(move |bytes| value(*bytes))
}

/// A checkpoint's weights, read.
pub(super) struct Weights {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Weights {
    pub(super) fn read(path: &Path) -> Result<Self, HuggingFaceError> {
        Ok(Self {
            path: path.into(),
            bytes: fs::read(path).map_err(io("read", path))?,
        })
    }

    fn file(&self) -> Result<SafeTensors<'_>, CheckpointError> {
        parse(&self.path, &self.bytes)
    }

    /// The rows of the tensor `name`, if it is there.
    pub(super) fn rows(&self, name: &str) -> Result<Option<usize>, CheckpointError> {
        let file = self.file()?;
        let shape = file.tensor(name).ok().map(|view| view.shape().to_vec());
        Ok(shape.and_then(|shape| shape.first().copied()))
    }

    /// Writes them to `out`, and the file to disk, if they are a model's of this shape.
    pub(super) fn write(
        &self,
        shape: &ModelShape,
        as_type: ExportType,
        out: &Path,
    ) -> Result<(), HuggingFaceError> {
        let file = self.file()?;
        let mut wanted = Wanted::of(shape);
        let mut written = Vec::new();
        for (name, view) in file.tensors() {
            if wanted.take(&name, &view, &[Dtype::F32], "F32") {
                written.push((name, Written { view, as_type }));
            }
        }
        wanted.finish(&self.path)?;
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        serialize_to_file(written, Some(metadata), out).map_err(|source| {
            HuggingFaceError::Safetensors {
                path: out.into(),
                source,
            }
        })?;
        File::open(out)
            .and_then(|file| file.sync_all())
            .map_err(io("sync", out))
    }
}

/// Copies the weights of the folder `from` into `params`, which have `shape`.
///
/// # Errors
/// [`HuggingFaceError`] that lists every missing, unexpected, misshapen or mistyped tensor.
pub(super) fn load(
    from: &Path,
    shape: &ModelShape,
    params: &Params,
) -> Result<(), HuggingFaceError> {
    let mut wanted = Wanted::of(shape);
    let (listed, files) = files(from)?;
    // A file at a time: large models are split so that one fits into memory.
    for path in files {
        let bytes = fs::read(&path).map_err(io("read", &path))?;
        for (name, view) in parse(&path, &bytes)?.tensors() {
            let read = [Dtype::F32, Dtype::BF16, Dtype::F16];
            if name.ends_with(FREQUENCIES) || !wanted.take(&name, &view, &read, READ) {
                continue;
            }
            let bytes = view.data();
            let values: Vec<f32> = match view.dtype() {
                Dtype::BF16 => {
                    widened::<2>(bytes, |bits| bf16::from_le_bytes(bits).to_f32()).collect()
                }
                Dtype::F16 => {
                    widened::<2>(bytes, |bits| f16::from_le_bytes(bits).to_f32()).collect()
                }
                _ => widened::<4>(bytes, f32::from_le_bytes).collect(),
            };
            let target = params.get(&name);
            no_grad(|| {
                let values = Tensor::f_from_slice(&values)?.f_reshape(target.size())?;
                target.shallow_clone().f_copy_(&values)
            })
            .map_err(|source| CheckpointError::Torch {
                path: path.clone(),
                source,
            })?;
        }
    }
    Ok(wanted.finish(&listed)?)
}

fn parse<'a>(path: &Path, bytes: &'a [u8]) -> Result<SafeTensors<'a>, CheckpointError> {
    SafeTensors::deserialize(bytes).map_err(|source| CheckpointError::NotSafetensors {
        path: path.into(),
        source,
    })
}

/// The file that tells which tensors there are, and those that hold them.
fn files(folder: &Path) -> Result<(PathBuf, Vec<PathBuf>), HuggingFaceError> {
    let (whole, index) = (folder.join(WEIGHTS), folder.join(INDEX));
    if whole.exists() || !index.exists() {
        return Ok((whole.clone(), vec![whole]));
    }
    let value = read_json(&index)?;
    let expected = "an object of tensors' names with the file of each, in the same folder";
    let map = &value["weight_map"];
    let refuse = || entry(&index, "weight_map", expected, map);
    let name = |file: &serde_json::Value| {
        let name = file.as_str()?.to_owned();
        (Path::new(&name).file_name()? == name.as_str()).then_some(name)
    };
    let names: Option<BTreeSet<String>> = map
        .as_object()
        .ok_or_else(refuse)?
        .values()
        .map(name)
        .collect();
    let names = names.ok_or_else(refuse)?;
    let files = names.into_iter().map(|name| folder.join(name)).collect();
    Ok((index, files))
}

/// The tensors that a model has, until each of them is found.
struct Wanted {
    shapes: BTreeMap<String, Vec<i64>>,
    problems: Vec<TensorProblem>,
}

impl Wanted {
    fn of(shape: &ModelShape) -> Self {
        // How they begin does not matter here.
        let parameters = shape.parameters(0.0).into_iter();
        Self {
            shapes: parameters.map(|spec| (spec.name, spec.shape)).collect(),
            problems: Vec::new(),
        }
    }

    /// Whether it is one of them, as it has to be; a problem else.
    fn take(
        &mut self,
        name: &str,
        view: &TensorView<'_>,
        types: &[Dtype],
        types_in_words: &'static str,
    ) -> bool {
        let found: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
        let name = name.to_owned();
        let problem = match self.shapes.remove(&name) {
            None => TensorProblem::Unexpected { name },
            Some(expected) if expected != found => TensorProblem::Shape {
                name,
                expected,
                found,
            },
            Some(_) if !types.contains(&view.dtype()) => TensorProblem::Dtype {
                name,
                expected: types_in_words,
                found: format!("{:?}", view.dtype()),
            },
            Some(_) => return true,
        };
        self.problems.push(problem);
        false
    }

    fn finish(mut self, path: &Path) -> Result<(), CheckpointError> {
        let missing = self.shapes.into_keys();
        self.problems
            .extend(missing.map(|name| TensorProblem::Missing { name }));
        if self.problems.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::Mismatch {
            path: path.into(),
            problems: self.problems,
        })
    }
}
