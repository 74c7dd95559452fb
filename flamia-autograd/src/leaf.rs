//! What torch lets one do with a parameter and its gradient, and tch does not.

use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use tch::{TchError, Tensor};
use torch_sys::C_tensor;

use crate::ffi::{give_text, panic_message, take_text};

/// What is called when a gradient is whole.
type Call = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

unsafe extern "C" {
    fn flamia_leaf_place(
        leaf: *mut C_tensor,
        place: *const C_tensor,
        grad: *const C_tensor,
    ) -> *mut c_char;
    fn flamia_leaf_changed(leaf: *const C_tensor) -> *mut c_char;
    fn flamia_leaf_hook(
        leaf: *const C_tensor,
        state: *mut c_void,
        call: unsafe extern "C" fn(*const c_void) -> *mut c_char,
        drop_state: unsafe extern "C" fn(*mut c_void),
    ) -> *mut c_char;
    fn flamia_leaf_unhook(leaf: *const C_tensor) -> *mut c_char;
}

/// Moves `leaf` to the memory of `place`, whose values it has from here on, and its gradient to that of
/// `grad`: parts of larger tensors, of the leaf's shape. Backwards add to the gradient in place.
///
/// # Errors
/// torch's, for other kinds or devices.
pub fn place_leaf(leaf: &mut Tensor, place: &Tensor, grad: &Tensor) -> Result<(), TchError> {
    // SAFETY: live tensors, the leaf borrowed exclusively; the text is ours.
    done(unsafe { flamia_leaf_place(leaf.as_mut_ptr(), place.as_ptr(), grad.as_ptr()) })
}

/// Has torch count a change of `leaf` that went through another tensor of its memory, so that copies that
/// go by the count are made again.
///
/// # Errors
/// None that are known.
pub fn leaf_changed(leaf: &Tensor) -> Result<(), TchError> {
    // SAFETY: a live tensor; the text is ours.
    done(unsafe { flamia_leaf_changed(leaf.as_ptr()) })
}

/// A call that a backward makes whenever it has added to the gradient of a leaf; it ends with this value.
#[derive(Debug)]
pub struct GradientHook {
    leaf: Tensor,
}

impl GradientHook {
    /// Has `call` called, on a thread of torch's engine, whenever a backward has added to the gradient of
    /// `leaf`, in place of an earlier hook. An error, or a panic, ends the backward with its text.
    ///
    /// # Errors
    /// torch's, for a tensor that is no leaf or has no gradient.
    pub fn new(
        leaf: &Tensor,
        call: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Result<Self, TchError> {
        let call: Call = Box::new(call);
        let state = Box::into_raw(Box::new(call));
        // SAFETY: a live tensor. `state` is a boxed `Call`, as `run` and `drop_call` expect, may go to
        // any thread, and is given away here; the text is ours.
        done(unsafe { flamia_leaf_hook(leaf.as_ptr(), state.cast(), run, drop_call) })?;
        Ok(Self {
            leaf: leaf.shallow_clone(),
        })
    }
}

impl Drop for GradientHook {
    fn drop(&mut self) {
        // SAFETY: a live tensor; the text is ours. There is nothing to be done about an error.
        let _ = unsafe { take_text(flamia_leaf_unhook(self.leaf.as_ptr())) };
    }
}

/// # Safety
/// `state` is a boxed [`Call`] that lives.
unsafe extern "C" fn run(state: *const c_void) -> *mut c_char {
    // SAFETY: by this function's contract; a `Call` may be shared.
    let call = unsafe { &*state.cast::<Call>() };
    // What the call left half done, it sees itself when it is called again.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(text)) => give_text(text),
        Err(panic) => give_text(format!(
            "a gradient's hook panicked: {}",
            panic_message(panic.as_ref())
        )),
    }
}

/// # Safety
/// `state` came from [`GradientHook::new`] and is not used again.
unsafe extern "C" fn drop_call(state: *mut c_void) {
    // A panic in a Drop of the call's has no caller; the panic hook has printed it.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: by this function's contract.
        drop(unsafe { Box::from_raw(state.cast::<Call>()) });
    }));
}

fn done(refusal: *mut c_char) -> Result<(), TchError> {
    // SAFETY: the shim's text is ours.
    match unsafe { take_text(refusal) } {
        None => Ok(()),
        Some(message) => Err(TchError::Torch(message)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tch::{Device, Kind, no_grad};

    use super::*;

    fn leaf(values: &[f32]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    #[test]
    fn a_placed_leaf_lives_in_the_memory_of_others() {
        let [weights, grads] = [(); 2].map(|()| Tensor::zeros([5], (Kind::Float, Device::Cpu)));
        let mut x = leaf(&[1.0, 2.0]);
        no_grad(|| weights.narrow(0, 1, 2).copy_(&x));
        place_leaf(&mut x, &weights.narrow(0, 1, 2), &grads.narrow(0, 1, 2)).unwrap();
        assert!(x.is_leaf() && x.requires_grad());
        for backwards in 1..=2 {
            (&x * &x).sum(Kind::Float).backward();
            let n = backwards as f32;
            assert_eq!(
                grads,
                Tensor::from_slice(&[0.0, 2.0 * n, 4.0 * n, 0.0, 0.0])
            );
        }
        let before = x.f_internal_version().unwrap();
        let _ = weights.narrow(0, 1, 2).fill_(7.0);
        assert_eq!(x, Tensor::from_slice(&[7f32, 7.0]));
        leaf_changed(&x).unwrap();
        assert!(x.f_internal_version().unwrap() > before);
        let _ = grads.shallow_clone().zero_();
        assert_eq!(x.grad(), Tensor::from_slice(&[0f32, 0.0]));
    }

    #[test]
    fn a_hook_is_called_once_a_backward_until_it_is_dropped() {
        let x = leaf(&[1.0]);
        let calls = Arc::new(AtomicUsize::new(0));
        let seen = (x.shallow_clone(), calls.clone());
        let seen = std::sync::Mutex::new(seen);
        let hook = GradientHook::new(&x, move || {
            let (x, calls) = &*seen.lock().unwrap();
            // The gradient is whole: of both uses, and of earlier backwards.
            let n = calls.fetch_add(1, Ordering::Relaxed) + 1;
            assert_eq!(x.grad(), Tensor::from_slice(&[5f32 * n as f32]));
            Ok(())
        })
        .unwrap();
        for _ in 0..3 {
            (&x * 2.0 + &x * 3.0).backward();
        }
        assert_eq!(calls.load(Ordering::Relaxed), 3);
        drop(hook);
        (&x * 2.0).backward();
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_hooks_error_or_panic_ends_the_backward() {
        let x = leaf(&[1.0]);
        let hook = GradientHook::new(&x, || Err("the network is gone".into())).unwrap();
        let error = (&x * 2.0).f_backward().unwrap_err().to_string();
        assert!(error.contains("the network is gone"), "{error}");
        drop(hook);
        let _hook = GradientHook::new(&x, || panic!("at the disco")).unwrap();
        let error = (&x * 2.0).f_backward().unwrap_err().to_string();
        assert!(error.contains("panicked: at the disco"), "{error}");
        let refused = GradientHook::new(&Tensor::from_slice(&[1f32]), || Ok(()));
        assert!(refused.unwrap_err().to_string().contains("leaf"));
    }
}
