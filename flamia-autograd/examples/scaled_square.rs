//! The smallest useful custom function: `y = scale * x^2` with its own backward.

use flamia_autograd::{BackwardContext, ForwardContext, Function, FunctionError, apply};
use tch::{Kind, Tensor};

/// The value carries what backward needs besides tensors.
struct ScaledSquare {
    scale: f64,
}

impl Function for ScaledSquare {
    fn forward(
        &mut self,
        ctx: &mut ForwardContext,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, FunctionError> {
        let x = inputs[0].ok_or_else(|| FunctionError::custom("x is required"))?;
        ctx.save_for_backward(&[x]);
        Ok(vec![x * x * self.scale])
    }

    fn backward(
        &self,
        ctx: &BackwardContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>, FunctionError> {
        let x = &ctx.saved()[0];
        Ok(vec![
            grads[0].as_ref().map(|grad| grad * x * (2.0 * self.scale)),
        ])
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let y = apply(ScaledSquare { scale: 3.0 }, &[Some(&x)])?;
    y[0].sum(Kind::Double).f_backward()?;

    let grad = Vec::<f64>::try_from(x.grad())?;
    println!("d(3 x^2)/dx at x = [1, 2] is {grad:?}");
    assert_eq!(grad, [6.0, 12.0]);
    Ok(())
}
