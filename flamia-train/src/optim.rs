//! AdamW whose state can be saved, and clipping by the global norm that lets no NaN through.
//!
//! tch's own optimisers hide their moments from the caller, so a run that used them could not be
//! resumed exactly; and their clipping compares a NaN norm with `<`, which passes it on.
//!
//! An update comes in two forms of the same arithmetic: [`AdamW::update`], operation by operation,
//! after the host has looked at the gradient, and [`AdamW::update_guarded`], fused, in which the
//! device itself clips and leaves the update out.

use flamia_autograd::{FusedAdamW, FusedParam};
use tch::{Device, Kind, TchError, Tensor, no_grad};

use crate::model::Params;

/// The constants of AdamW (Loshchilov and Hutter, 2019).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay, per unit of learning rate, of the matrices (see [`AdamW`]).
    pub weight_decay: f64,
}

/// AdamW over a model's parameters.
///
/// Matrices decay, the embedding and the output head among them, as in Llama's published
/// training; the norms' gains, which are vectors, do not.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// Updates done or left out, which the bias correction goes by.
    step: u64,
    /// First and second moments, in the parameters' order.
    moments: Vec<Moments>,
    /// Whether the device decides about updates, and not the host.
    guarded: bool,
}

#[derive(Debug)]
struct Moments {
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
}

/// A parameter, or a part of one, as a guarded update sees it: Float tensors of one shape.
#[derive(Debug)]
pub(crate) struct Slot {
    pub weight: Tensor,
    pub grad: Tensor,
    /// Whether weight decay is for it.
    pub decays: bool,
}

impl AdamW {
    /// Fresh state: zero moments, no step done. Steps of parameters on a GPU are guarded there.
    ///
    /// # Errors
    /// When the moments cannot be allocated.
    pub fn new(config: AdamWConfig, params: &Params) -> Result<Self, TchError> {
        let moments = params
            .iter()
            .map(|(_, param)| {
                let zeros = || Tensor::f_zeros(param.size(), (Kind::Float, param.device()));
                Ok(Moments {
                    exp_avg: zeros()?,
                    exp_avg_sq: zeros()?,
                })
            })
            .collect::<Result<_, TchError>>()?;
        Ok(Self {
            config,
            step: 0,
            moments,
            guarded: params
                .iter()
                .any(|(_, param)| param.device() != Device::Cpu),
        })
    }

    /// Has steps guarded by the device on a CPU too.
    pub fn guard(&mut self) {
        self.guarded = true;
    }

    /// Whether steps are to take [`AdamW::update_guarded`].
    pub fn is_guarded(&self) -> bool {
        self.guarded
    }

    /// Updates done or left out.
    pub fn step_count(&self) -> u64 {
        self.step
    }

    /// Moves every parameter along its gradient at learning rate `lr`.
    ///
    /// A parameter without a gradient counts as having a zero one: its moments decay and it decays.
    ///
    /// # Errors
    /// When torch refuses an operation, for want of memory for instance.
    pub fn update(&mut self, params: &mut Params, lr: f64) -> Result<(), TchError> {
        let AdamWConfig {
            beta1,
            beta2,
            eps,
            weight_decay,
        } = self.config;
        self.step += 1;
        let correction1 = 1.0 - beta1.powf(self.step as f64);
        let correction2 = 1.0 - beta2.powf(self.step as f64);
        no_grad(|| {
            for (
                (_, param),
                Moments {
                    exp_avg,
                    exp_avg_sq,
                },
            ) in params.iter_mut().zip(&mut self.moments)
            {
                let grad = match param.grad() {
                    grad if grad.defined() => grad,
                    _ => param.f_zeros_like()?,
                };
                if param.dim() >= 2 {
                    let _ = param.f_mul_scalar_(1.0 - lr * weight_decay)?;
                }
                let _ = exp_avg.f_lerp_(&grad, 1.0 - beta1)?;
                let _ = exp_avg_sq
                    .f_mul_scalar_(beta2)?
                    .f_add_(&grad.f_square()?.f_mul_scalar_(1.0 - beta2)?)?;
                let mut denominator = exp_avg_sq.f_sqrt()?;
                let _ = denominator
                    .f_div_scalar_(correction2.sqrt())?
                    .f_add_scalar_(eps)?;
                let mut update = exp_avg.f_div(&denominator)?;
                let _ = param.f_sub_(&update.f_mul_scalar_(lr / correction1)?)?;
            }
            Ok(())
        })
    }

    /// [`AdamW::update`] as far as `guard` allows, without the host waiting for the device. Gradients
    /// are left clipped. An update that is left out counts as one, so that nothing but its number
    /// tells where a run stands.
    ///
    /// # Errors
    /// As [`AdamW::update`].
    pub fn update_guarded(
        &mut self,
        params: &mut Params,
        lr: f64,
        guard: &Guard,
    ) -> Result<(), TchError> {
        let slots = params.iter().map(|(_, param)| {
            let grad = match param.grad() {
                grad if grad.defined() => grad,
                _ => no_grad(|| param.f_zeros_like())?,
            };
            Ok(Slot {
                weight: param.shallow_clone(),
                grad,
                decays: param.dim() >= 2,
            })
        });
        let mut slots = slots.collect::<Result<Vec<_>, TchError>>()?;
        self.update_slots(&mut slots, lr, guard)
    }

    /// [`AdamW::update_guarded`] of `slots`, in the order of the moments.
    pub(crate) fn update_slots(
        &mut self,
        slots: &mut [Slot],
        lr: f64,
        guard: &Guard,
    ) -> Result<(), TchError> {
        self.step += 1;
        let device = guard.skip.device();
        let step = Tensor::f_full([] as [i64; 0], self.step as f64, (Kind::Float, device))?;
        let (mut matrices, mut vectors) = (Vec::new(), Vec::new());
        for (slot, moments) in slots.iter_mut().zip(&mut self.moments) {
            let list = match slot.decays {
                true => &mut matrices,
                false => &mut vectors,
            };
            list.push(FusedParam {
                param: &mut slot.weight,
                grad: slot.grad.shallow_clone(),
                exp_avg: &mut moments.exp_avg,
                exp_avg_sq: &mut moments.exp_avg_sq,
            });
        }
        for (mut params, weight_decay) in [(matrices, self.config.weight_decay), (vectors, 0.0)] {
            FusedAdamW {
                lr,
                beta1: self.config.beta1,
                beta2: self.config.beta2,
                weight_decay,
                eps: self.config.eps,
                step: &step,
                grad_scale: &guard.grad_scale,
                skip: &guard.skip,
            }
            .update(&mut params)?;
        }
        Ok(())
    }

    /// Counts an update that is not done, as [`AdamW::update_guarded`] counts those that it leaves out.
    pub fn leave_out(&mut self) {
        self.step += 1;
    }

    /// The state by name: `exp_avg.NAME` and `exp_avg_sq.NAME` for every parameter.
    pub fn tensors<'a>(&'a self, params: &'a Params) -> Vec<(String, &'a Tensor)> {
        params
            .iter()
            .zip(&self.moments)
            .flat_map(|((name, _), moments)| {
                [
                    (format!("exp_avg.{name}"), &moments.exp_avg),
                    (format!("exp_avg_sq.{name}"), &moments.exp_avg_sq),
                ]
            })
            .collect()
    }

    /// The first and second moment of the parameter `index`.
    pub(crate) fn moments_of(&self, index: usize) -> [&Tensor; 2] {
        let moments = &self.moments[index];
        [&moments.exp_avg, &moments.exp_avg_sq]
    }

    /// An optimiser that stands where this one does, over other slots with these moments.
    pub(crate) fn with_moments(&self, moments: impl IntoIterator<Item = [Tensor; 2]>) -> Self {
        let moments = moments.into_iter();
        Self {
            config: self.config,
            step: self.step,
            moments: moments
                .map(|[exp_avg, exp_avg_sq]| Moments {
                    exp_avg,
                    exp_avg_sq,
                })
                .collect(),
            guarded: true,
        }
    }

    /// Takes up the count of updates that belongs to restored moments.
    pub fn restore_step_count(&mut self, step: u64) {
        self.step = step;
    }
}

/// What a device is told about an update that the host has not looked at.
#[derive(Debug)]
pub struct Guard {
    /// What the gradient is divided by, at least 1.
    grad_scale: Tensor,
    /// 1 where the loss or the gradient is not finite, else 0.
    skip: Tensor,
}

impl Guard {
    /// Clips a gradient of this `norm` to `max_norm`, and leaves the update out if `norm` or `loss` is
    /// not finite. Both are Doubles of shape `[]`.
    ///
    /// # Errors
    /// When torch refuses an operation.
    pub fn new(loss: &Tensor, norm: &Tensor, max_norm: f64) -> Result<Self, TchError> {
        let finite = loss.f_isfinite()?.f_logical_and(&norm.f_isfinite()?)?;
        Ok(Self {
            grad_scale: norm
                .f_div_scalar(max_norm)?
                .f_clamp_min(1.0)?
                .f_to_kind(Kind::Float)?,
            skip: finite.f_logical_not()?.f_to_kind(Kind::Float)?,
        })
    }
}

/// The Euclidean norm of all gradients together, as one vector: a Double of shape `[]`, which the host
/// has not waited for.
///
/// # Errors
/// When torch refuses an operation.
pub fn norm_on_device(params: &Params) -> Result<Tensor, TchError> {
    no_grad(|| {
        let norms = params
            .iter()
            .map(|(_, param)| param.grad())
            .filter(Tensor::defined)
            .map(|grad| grad.f_norm())
            .collect::<Result<Vec<_>, _>>()?;
        if norms.is_empty() {
            return Ok(Tensor::from(0f64));
        }
        Tensor::f_stack(&norms, 0)?
            .f_to_kind(Kind::Double)?
            .f_norm()
    })
}

/// [`norm_on_device`] as a number.
///
/// # Errors
/// When torch refuses an operation.
pub fn global_norm(params: &Params) -> Result<f64, TchError> {
    norm_on_device(params)?.f_double_value(&[])
}

/// Scales all gradients down so that their global norm is at most `max_norm`; returns the norm
/// they had.
///
/// A norm that is NaN or infinite is returned and nothing is scaled: the caller must leave the update
/// out.
///
/// # Errors
/// When torch refuses an operation.
pub fn clip_global_norm(params: &Params, max_norm: f64) -> Result<f64, TchError> {
    let norm = global_norm(params)?;
    if norm.is_finite() && norm > max_norm {
        for (_, param) in params.iter() {
            let mut grad = param.grad();
            if grad.defined() {
                no_grad(|| grad.f_mul_scalar_(max_norm / norm).map(drop))?;
            }
        }
    }
    Ok(norm)
}
