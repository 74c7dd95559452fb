//! The only place that speaks to the shim's half of the graph. The rules of `shim/function.h` hold throughout:
//! tensor pointers are borrowed for one call, only the backward closure changes hands, errors are
//! malloc'ed texts, nothing unwinds across the border.

use std::any::Any;
use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::FunctionError;
use crate::function::BackwardContext;

/// A backward as the graph keeps it.
pub(crate) type Backward = Box<
    dyn Fn(&BackwardContext, &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, FunctionError>
        + Send,
>;

/// What `FlamiaForward::state` points to.
struct State {
    name: String,
    backward: Backward,
}

#[repr(C)]
struct BackwardCall {
    saved: *const *mut C_tensor,
    saved_len: usize,
    grads: *const *mut C_tensor,
    grads_len: usize,
    needs_input_grad: *const bool,
    input_grads: *const *mut C_tensor,
    inputs_len: usize,
    grad_enabled: bool,
}

#[repr(C)]
struct Forward {
    name: *const c_char,
    inputs: *const *const C_tensor,
    inputs_len: usize,
    outputs: *const *mut C_tensor,
    non_differentiable: *const bool,
    outputs_len: usize,
    saved: *const *const C_tensor,
    saved_len: usize,
    state: *mut c_void,
    backward: unsafe extern "C" fn(*const c_void, *const BackwardCall) -> *mut c_char,
    drop_state: unsafe extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    fn flamia_attach(forward: *const Forward) -> *mut c_char;
    fn flamia_assign(slot: *mut C_tensor, value: *const C_tensor);
    safe fn flamia_grad_enabled() -> bool;
    safe fn flamia_torch_version() -> *mut c_char;
}

/// Whether torch records a graph on this thread.
pub(crate) fn grad_enabled() -> bool {
    flamia_grad_enabled()
}

/// The version of the libtorch that is loaded, such as `2.11.0+cpu`; empty if it does not say.
pub fn torch_version() -> &'static str {
    static FOUND: OnceLock<String> = OnceLock::new();
    FOUND.get_or_init(|| {
        // SAFETY: the shim returns a malloc'ed text that is ours.
        unsafe { take_text(flamia_torch_version()) }.unwrap_or_default()
    })
}

/// Compares the loaded libtorch with the one that the shim was compiled for.
pub(crate) fn check_torch_version() -> Result<(), FunctionError> {
    const WANTED: &str = "2.11";
    let found = torch_version();
    let same = found
        .strip_prefix(WANTED)
        .is_some_and(|patch| patch.starts_with('.'));
    if same || found.is_empty() {
        Ok(())
    } else {
        Err(FunctionError::TorchVersion {
            wanted: WANTED,
            found: found.to_owned(),
        })
    }
}

/// Replaces `outputs` by tensors of the graph whose backward is `backward`, which is dropped at
/// once if no graph is built. `non_differentiable` has one entry per output.
pub(crate) fn attach(
    name: &str,
    inputs: &[Option<&Tensor>],
    outputs: &mut [Tensor],
    non_differentiable: &[bool],
    saved: &[Tensor],
    backward: Backward,
) -> Result<(), String> {
    assert_eq!(outputs.len(), non_differentiable.len());
    let c_name = CString::new(name.replace('\0', "")).unwrap_or_default();
    let inputs: Vec<_> = inputs
        .iter()
        .map(|input| input.map_or(ptr::null(), Tensor::as_ptr))
        .collect();
    let outputs: Vec<_> = outputs.iter_mut().map(Tensor::as_mut_ptr).collect();
    let saved: Vec<_> = saved.iter().map(Tensor::as_ptr).collect();
    let state = Box::new(State {
        name: name.to_owned(),
        backward,
    });

    let forward = Forward {
        name: c_name.as_ptr(),
        inputs: inputs.as_ptr(),
        inputs_len: inputs.len(),
        outputs: outputs.as_ptr(),
        non_differentiable: non_differentiable.as_ptr(),
        outputs_len: outputs.len(),
        saved: saved.as_ptr(),
        saved_len: saved.len(),
        state: Box::into_raw(state).cast(),
        backward: run_backward,
        drop_state,
    };
    // SAFETY: every pointer is valid for this call, with the length beside it; `outputs` is
    // borrowed exclusively. `state` is a boxed `State`, which `run_backward` and `drop_state`
    // expect, is `Send`, and is given away here. The returned text is ours.
    match unsafe { take_text(flamia_attach(&forward)) } {
        None => Ok(()),
        Some(message) => Err(message),
    }
}

/// The text of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "(a panic without a text)".to_owned()
    }
}

/// # Safety
/// `state` is the `State` of a node whose lock the shim holds, and `call` is valid for this call.
unsafe extern "C" fn run_backward(state: *const c_void, call: *const BackwardCall) -> *mut c_char {
    // SAFETY: by this function's contract. The lock makes up for `State` not being `Sync`.
    let (state, call) = unsafe { (&*state.cast::<State>(), &*call) };
    // The state may be used again after a panic. `Function::backward` takes `&self`, so that at
    // worst the function sees its own half-done interior mutation.
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: by this function's contract.
        unsafe { fill_input_grads(state, call) }
            .map_err(|error| format!("backward of {}: {error}", state.name))
    }));
    match result {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(text)) => give_text(text),
        Err(panic) => give_text(
            FunctionError::Panic {
                function: state.name.clone(),
                pass: "backward",
                message: panic_message(panic.as_ref()),
            }
            .to_string(),
        ),
    }
}

/// # Safety
/// The pointers of `call` are valid, each with the length beside it.
unsafe fn fill_input_grads(state: &State, call: &BackwardCall) -> Result<(), FunctionError> {
    // SAFETY: by this function's contract.
    let (saved, grads, needs_input_grad, slots) = unsafe {
        (
            tensors(call.saved, call.saved_len),
            tensors(call.grads, call.grads_len),
            slice(call.needs_input_grad, call.inputs_len).to_vec(),
            slice(call.input_grads, call.inputs_len),
        )
    };
    let ctx = BackwardContext {
        saved: saved
            .into_iter()
            .map(|tensor| tensor.unwrap_or_else(Tensor::new))
            .collect(),
        needs_input_grad,
        grad_enabled: call.grad_enabled,
    };

    let input_grads = (state.backward)(&ctx, &grads)?;
    if input_grads.len() != slots.len() {
        return Err(FunctionError::GradientCount {
            expected: slots.len(),
            found: input_grads.len(),
        });
    }
    for (&slot, grad) in slots.iter().zip(&input_grads) {
        if let Some(grad) = grad {
            // SAFETY: the slot is a tensor of the shim's, waiting for this value.
            unsafe { flamia_assign(slot, grad.as_ptr()) };
        }
    }
    Ok(())
}

/// # Safety
/// `state` came from `Box::into_raw` in [`attach`] and is not used again.
unsafe extern "C" fn drop_state(state: *mut c_void) {
    // A panic in a Drop of the function's has no caller that could hear of it; the panic hook has
    // printed it.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: by this function's contract.
        drop(unsafe { Box::from_raw(state.cast::<State>()) });
    }));
}

/// New handles on borrowed tensors; a null pointer becomes `None`.
///
/// # Safety
/// `pointers` is valid for `len` entries, each null or a live tensor.
unsafe fn tensors(pointers: *const *mut C_tensor, len: usize) -> Vec<Option<Tensor>> {
    // SAFETY: by this function's contract.
    let pointers = unsafe { slice(pointers, len) };
    pointers
        .iter()
        .map(|&pointer| {
            // SAFETY: not null, so a live tensor.
            (!pointer.is_null()).then(|| unsafe { Tensor::clone_from_ptr(pointer) })
        })
        .collect()
}

/// A slice that may be empty with a null pointer, as an empty `std::vector` gives it.
///
/// # Safety
/// `pointer` is valid for `len` entries.
unsafe fn slice<'a, T>(pointer: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        &[]
    } else {
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts(pointer, len) }
    }
}

/// A malloc'ed copy, for C++ to free.
pub(crate) fn give_text(text: String) -> *mut c_char {
    let text = CString::new(text.replace('\0', "")).unwrap_or_default();
    // SAFETY: `text` is a C string.
    unsafe { libc::strdup(text.as_ptr()) }
}

/// Copies and frees a text of the shim's; `None` for null.
///
/// # Safety
/// `text` is null, or a C string from malloc that nobody else frees.
pub(crate) unsafe fn take_text(text: *mut c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: by this function's contract.
    unsafe {
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        Some(copy)
    }
}
