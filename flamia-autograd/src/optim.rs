//! torch's fused AdamW, which tch has not: all parameters in a few launches, and what may not be
//! known on the host (the gradient's norm, whether anything is NaN) read on the device.

use std::ffi::{c_char, c_double};

use tch::{TchError, Tensor};
use torch_sys::C_tensor;

use crate::ffi::take_text;

/// The constants of an update, and what the device knows about it.
#[derive(Debug)]
pub struct FusedAdamW<'a> {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decoupled weight decay, per unit of learning rate.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Updates done, this one included: a Float of shape `[]`, as the next two.
    pub step: &'a Tensor,
    /// What gradients are divided by; they are left divided.
    pub grad_scale: &'a Tensor,
    /// 1 leaves parameters and moments as they are, 0 does not.
    pub skip: &'a Tensor,
}

/// The Float tensors of a parameter, of one shape and on the device of all others.
#[derive(Debug)]
pub struct FusedParam<'a> {
    /// The parameter.
    pub param: &'a mut Tensor,
    /// Its gradient.
    pub grad: Tensor,
    /// Its first moment.
    pub exp_avg: &'a mut Tensor,
    /// Its second moment.
    pub exp_avg_sq: &'a mut Tensor,
}

#[repr(C)]
struct RawCall {
    params: *const *mut C_tensor,
    grads: *const *const C_tensor,
    exp_avgs: *const *mut C_tensor,
    exp_avg_sqs: *const *mut C_tensor,
    len: usize,
    lr: c_double,
    beta1: c_double,
    beta2: c_double,
    weight_decay: c_double,
    eps: c_double,
    step: *const C_tensor,
    grad_scale: *const C_tensor,
    skip: *const C_tensor,
}

unsafe extern "C" {
    fn flamia_fused_adamw(call: *const RawCall) -> *mut c_char;
}

impl FusedAdamW<'_> {
    /// Moves every parameter along its gradient. The host waits for nothing.
    ///
    /// # Errors
    /// torch's, for tensors of other kinds, shapes or devices.
    pub fn update(&self, params: &mut [FusedParam<'_>]) -> Result<(), TchError> {
        if params.is_empty() {
            return Ok(());
        }
        let grads: Vec<_> = params.iter().map(|param| param.grad.as_ptr()).collect();
        let (mut weights, mut exp_avgs, mut exp_avg_sqs) = (Vec::new(), Vec::new(), Vec::new());
        for param in params.iter_mut() {
            weights.push(param.param.as_mut_ptr());
            exp_avgs.push(param.exp_avg.as_mut_ptr());
            exp_avg_sqs.push(param.exp_avg_sq.as_mut_ptr());
        }
        let call = RawCall {
            params: weights.as_ptr(),
            grads: grads.as_ptr(),
            exp_avgs: exp_avgs.as_ptr(),
            exp_avg_sqs: exp_avg_sqs.as_ptr(),
            len: params.len(),
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            weight_decay: self.weight_decay,
            eps: self.eps,
            step: self.step.as_ptr(),
            grad_scale: self.grad_scale.as_ptr(),
            skip: self.skip.as_ptr(),
        };
        // SAFETY: the lists are of `len` tensors that outlive the call, those that change are
        // borrowed exclusively, and the text is ours.
        match unsafe { take_text(flamia_fused_adamw(&raw const call)) } {
            None => Ok(()),
            Some(message) => Err(TchError::Torch(message)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn a_change_is_counted_as_one_and_a_refusal_is_an_error() {
        let zeros = |kind| Tensor::zeros([3], (kind, Device::Cpu));
        let scalar = |value: f32| Tensor::from(value);
        let (step, grad_scale, skip) = (scalar(1.0), scalar(2.0), scalar(0.0));
        let adamw = FusedAdamW {
            lr: 0.5,
            beta1: 0.9,
            beta2: 0.95,
            weight_decay: 0.0,
            eps: 1e-8,
            step: &step,
            grad_scale: &grad_scale,
            skip: &skip,
        };
        let mut param = zeros(Kind::Float).set_requires_grad(true);
        let [mut exp_avg, mut exp_avg_sq] = [(); 2].map(|()| zeros(Kind::Float));
        let mut update = |grad: Tensor| {
            adamw.update(&mut [FusedParam {
                param: &mut param,
                grad,
                exp_avg: &mut exp_avg,
                exp_avg_sq: &mut exp_avg_sq,
            }])
        };
        assert!(update(zeros(Kind::Double)).is_err());
        update(Tensor::from_slice(&[4f32, -4.0, 0.0])).unwrap();
        // The first update is lr in the gradient's direction, whatever its length.
        assert!(param.allclose(&Tensor::from_slice(&[-0.5f32, 0.5, 0.0]), 1e-6, 1e-6, false));
        assert!(exp_avg.allclose(&Tensor::from_slice(&[0.2f32, -0.2, 0.0]), 1e-6, 1e-6, false));
        // What is derived from a parameter can tell that it is outdated.
        assert!(param.f_internal_version().unwrap() > 0);
    }
}
