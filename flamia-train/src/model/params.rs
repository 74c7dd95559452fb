//! The weights: an ordered list of named f32 tensors.

use std::collections::HashMap;

use tch::{Device, Kind, TchError, Tensor, no_grad};

use crate::rng::Normals;

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Independent normal draws around 0.
    Normal {
        /// Their standard deviation.
        std: f64,
    },
    /// All ones: a norm's gain.
    Ones,
}

/// One parameter before it exists.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamSpec {
    /// Hugging Face's name for it.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// How it starts.
    pub init: Init,
}

/// Named parameters in a fixed order, all of them f32 leaves that collect gradients.
///
/// The set of names and the shapes never change after construction, and new values are copied into
/// the same tensors, so nothing can hold an outdated copy of a weight.
#[derive(Debug)]
pub struct Params {
    tensors: Vec<(String, Tensor)>,
    index: HashMap<String, usize>,
}

impl Params {
    /// Draws every parameter of `specs`, in order, from the stream of `seed`.
    ///
    /// # Errors
    /// When the tensors cannot be allocated.
    pub fn init(specs: &[ParamSpec], seed: u64, device: Device) -> Result<Self, TchError> {
        let mut normals = Normals::new(seed);
        Self::build(specs, |spec| {
            let count = spec.shape.iter().product::<i64>() as usize;
            // Drawn on the CPU: a device's own generator would give other weights.
            let values = match spec.init {
                Init::Normal { std } => normals.draw(count, std),
                Init::Ones => vec![1.0; count],
            };
            Tensor::f_from_slice(&values)?
                .f_reshape(&spec.shape)?
                .f_to_device(device)
        })
    }

    /// The parameters of `specs`, all zero: for a model whose weights are loaded next.
    ///
    /// # Errors
    /// When the tensors cannot be allocated.
    pub fn zeros(specs: &[ParamSpec], device: Device) -> Result<Self, TchError> {
        Self::build(specs, |spec| {
            Tensor::f_zeros(&spec.shape, (Kind::Float, device))
        })
    }

    fn build(
        specs: &[ParamSpec],
        mut make: impl FnMut(&ParamSpec) -> Result<Tensor, TchError>,
    ) -> Result<Self, TchError> {
        let tensors = specs
            .iter()
            .map(|spec| Ok((spec.name.clone(), make(spec)?.f_set_requires_grad(true)?)))
            .collect::<Result<Vec<_>, TchError>>()?;
        let index = tensors
            .iter()
            .enumerate()
            .map(|(i, (name, _))| (name.clone(), i))
            .collect();
        Ok(Self { tensors, index })
    }

    /// The parameter called `name`.
    ///
    /// # Panics
    /// When there is none: names come from the model's own shape, never from a user.
    pub fn get(&self, name: &str) -> &Tensor {
        match self.index.get(name) {
            Some(&i) => &self.tensors[i].1,
            None => panic!("the model has no parameter {name}"),
        }
    }

    /// All parameters in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// All parameters in order, to be changed in place.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.tensors
            .iter_mut()
            .map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The number of weights.
    pub fn count(&self) -> usize {
        self.tensors.iter().map(|(_, tensor)| tensor.numel()).sum()
    }

    /// Sets all gradients to zero, keeping their memory.
    pub fn zero_grad(&mut self) {
        no_grad(|| {
            self.tensors
                .iter_mut()
                .for_each(|(_, tensor)| tensor.zero_grad())
        });
    }
}
