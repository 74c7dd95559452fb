//! Helpers of the integration tests. Each test binary uses its own part of them.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use flamia_autograd::{
    BackwardContext, ForwardContext, Function, FunctionError, apply, gradcheck::gradcheck,
};
use tch::{Device, Kind, Tensor};

/// Counts the tokens that are alive.
#[derive(Clone, Default)]
pub struct Alive(Arc<AtomicUsize>);

pub struct Token(Arc<AtomicUsize>);

impl Alive {
    pub fn token(&self) -> Token {
        self.0.fetch_add(1, Ordering::SeqCst);
        Token(self.0.clone())
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// `a * b` with broadcasting; saves both inputs.
pub struct Product {
    pub token: Option<Token>,
}

impl Function for Product {
    fn forward(
        &mut self,
        ctx: &mut ForwardContext,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, FunctionError> {
        let (a, b) = (inputs[0].unwrap(), inputs[1].unwrap());
        ctx.save_for_backward(&[a, b]);
        Ok(vec![a.f_mul(b)?])
    }

    fn backward(
        &self,
        ctx: &BackwardContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>, FunctionError> {
        let [a, b] = ctx.saved() else {
            return Err(FunctionError::custom("saved a and b"));
        };
        let grad = grads[0].as_ref().unwrap();
        Ok(vec![
            ctx.needs_input_grad(0).then(|| grad * b),
            ctx.needs_input_grad(1).then(|| grad * a),
        ])
    }
}

pub fn product(a: &Tensor, b: &Tensor) -> Result<Tensor, FunctionError> {
    one(apply(Product { token: None }, &[Some(a), Some(b)]))
}

/// The only output of a function that has one.
pub fn one(outputs: Result<Vec<Tensor>, FunctionError>) -> Result<Tensor, FunctionError> {
    let mut outputs = outputs?;
    assert_eq!(outputs.len(), 1);
    Ok(outputs.remove(0))
}

/// A leaf with zero-centred values that are all different.
pub fn leaf(size: &[i64]) -> Tensor {
    let len: i64 = size.iter().product();
    let values = Tensor::arange(len, (Kind::Double, tch::Device::Cpu));
    ((values * 0.7311 + 0.3).sin() * 2.0)
        .reshape(size)
        .set_requires_grad(true)
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

/// [`gradcheck`] with the tolerances of smooth functions of order one.
pub fn assert_gradients<F>(f: F, inputs: &[Tensor])
where
    F: Fn(&[Tensor]) -> Result<Vec<Tensor>, FunctionError>,
{
    gradcheck(f, inputs, 1e-6, 1e-8, 1e-6).unwrap_or_else(|error| panic!("{error}"));
}

/// Of all elements, in double precision on the host.
pub fn cosine(a: &Tensor, b: &Tensor) -> f64 {
    let [a, b] = [a, b].map(|x| {
        let x = x.detach().to_device(Device::Cpu);
        x.to_kind(Kind::Double).reshape([-1])
    });
    a.dot(&b).double_value(&[]) / (a.dot(&a) * b.dot(&b)).sqrt().double_value(&[])
}
