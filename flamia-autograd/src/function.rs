//! A pair of forward and backward, written in Rust, as a node of torch's graph.

use std::any::type_name;
use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::Tensor;

use crate::error::FunctionError;
use crate::ffi;

/// A differentiable operation.
///
/// The value itself is the state that backward needs besides tensors. It is dropped when the
/// graph is (or right after a backward that does not keep the graph), on whatever thread that
/// happens, and at once when no graph is built: under `no_grad`, or when no input requires grad.
///
/// Tensors for backward belong in [`ForwardContext::save_for_backward`], not in the value: only
/// there does torch notice when one is modified before backward. An output kept in the value
/// would make the graph own itself, so [`apply`] refuses it.
pub trait Function: Send + 'static {
    /// The name in error messages and in torch's profiler.
    fn name(&self) -> Cow<'static, str> {
        Cow::Borrowed(type_name::<Self>())
    }

    /// Computes the outputs, at least one. Runs with gradients off.
    ///
    /// `inputs` has one entry per argument, `None` for an optional one that is absent. The inputs
    /// must not be modified in place. An input may be returned as an output.
    fn forward(
        &mut self,
        ctx: &mut ForwardContext,
        inputs: &[Option<&Tensor>],
    ) -> Result<Vec<Tensor>, FunctionError>;

    /// Computes the gradients of the inputs from those of the outputs.
    ///
    /// `grads` has one entry per output, `None` for an output that received no gradient. The
    /// result has one entry per input, `None` for no gradient; what is returned for an input that
    /// needs none is ignored. torch completes a gradient as it does for its own functions: a
    /// larger shape that the input broadcasts to is summed, another floating-point kind is cast;
    /// any other shape, and another device, is an error of `f_backward`.
    ///
    /// Runs with gradients off, except under `create_graph` (see
    /// [`BackwardContext::grad_enabled`]). A second derivative is right only if this is written
    /// with differentiable tch operations on [`BackwardContext::saved`] and `grads`: what is
    /// computed outside of torch counts as constant.
    fn backward(
        &self,
        ctx: &BackwardContext,
        grads: &[Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>, FunctionError>;
}

/// What a forward can tell the graph.
pub struct ForwardContext {
    needs_input_grad: Vec<bool>,
    builds_graph: bool,
    saved: Vec<Tensor>,
    non_differentiable: Vec<usize>,
}

impl ForwardContext {
    fn new(inputs: &[Option<&Tensor>]) -> Self {
        Self {
            builds_graph: builds_graph(inputs),
            needs_input_grad: inputs.iter().map(needs_grad).collect(),
            saved: Vec::new(),
            non_differentiable: Vec::new(),
        }
    }

    /// Keeps tensors for backward: inputs, outputs or intermediate results. Several calls append.
    ///
    /// They are released after backward unless the graph is kept. Nothing is kept if no graph is
    /// built.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        if self.builds_graph {
            self.saved
                .extend(tensors.iter().map(|tensor| tensor.shallow_clone()));
        }
    }

    /// Declares that the output at `index` has no gradient. Outputs of integer kinds never have.
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }

    /// Whether a backward may ask for the gradient of the input at `index`; false if there is no
    /// such input, it is absent, or gradients are off.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs_input_grad.get(index).copied().unwrap_or(false)
    }
}

/// Whether a call with `inputs` becomes a node of the graph.
pub(crate) fn builds_graph(inputs: &[Option<&Tensor>]) -> bool {
    inputs.iter().any(needs_grad)
}

fn needs_grad(input: &Option<&Tensor>) -> bool {
    ffi::grad_enabled() && input.is_some_and(Tensor::requires_grad)
}

/// What a backward can ask the graph.
pub struct BackwardContext {
    pub(crate) saved: Vec<Tensor>,
    pub(crate) needs_input_grad: Vec<bool>,
    pub(crate) grad_enabled: bool,
}

impl BackwardContext {
    /// The saved tensors, in the order of saving.
    pub fn saved(&self) -> &[Tensor] {
        &self.saved
    }

    /// Whether this run of backward uses the gradient of the input at `index`; false if there is
    /// no such input.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs_input_grad.get(index).copied().unwrap_or(false)
    }

    /// Whether the backward is itself recorded, for a second derivative (`create_graph`).
    pub fn grad_enabled(&self) -> bool {
        self.grad_enabled
    }
}

/// Runs `function` on `inputs` and enters the outputs in torch's graph.
///
/// # Errors
/// Whatever the forward returns; a panic in it; no output or an undefined one; an input modified
/// in place; an output that the function keeps. A failing backward is reported by `f_backward`.
pub fn apply<F: Function>(
    mut function: F,
    inputs: &[Option<&Tensor>],
) -> Result<Vec<Tensor>, FunctionError> {
    let name = function.name();
    let forward = run_forward(&name, inputs, |ctx, inputs| function.forward(ctx, inputs))?;
    forward.attach(&name, inputs, move |ctx, grads| {
        function.backward(ctx, grads)
    })
}

/// [`apply`] for two closures, which may own what they need; `name` is for error messages.
///
/// # Errors
/// As for [`apply`].
pub fn apply_fn<F, B>(
    name: &str,
    inputs: &[Option<&Tensor>],
    forward: F,
    backward: B,
) -> Result<Vec<Tensor>, FunctionError>
where
    F: FnOnce(&mut ForwardContext, &[Option<&Tensor>]) -> Result<Vec<Tensor>, FunctionError>,
    B: Fn(&BackwardContext, &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, FunctionError>
        + Send
        + 'static,
{
    run_forward(name, inputs, forward)?.attach(name, inputs, backward)
}

/// A forward that has run and is not yet in the graph.
struct FinishedForward {
    ctx: ForwardContext,
    outputs: Vec<Tensor>,
}

fn run_forward<F>(
    name: &str,
    inputs: &[Option<&Tensor>],
    forward: F,
) -> Result<FinishedForward, FunctionError>
where
    F: FnOnce(&mut ForwardContext, &[Option<&Tensor>]) -> Result<Vec<Tensor>, FunctionError>,
{
    ffi::check_torch_version()?;
    let mut ctx = ForwardContext::new(inputs);
    let versions = versions(inputs);

    // A panic leaves nothing behind that is used again: the context goes with it.
    let outputs = catch_unwind(AssertUnwindSafe(|| {
        let _guard = tch::no_grad_guard();
        forward(&mut ctx, inputs)
    }))
    .unwrap_or_else(|panic| {
        Err(FunctionError::Panic {
            function: name.to_owned(),
            pass: "forward",
            message: ffi::panic_message(panic.as_ref()),
        })
    })?;

    let function = || name.to_owned();
    if outputs.is_empty() {
        return Err(FunctionError::NoOutputs {
            function: function(),
        });
    }
    if let Some(index) = outputs.iter().position(|output| !output.defined()) {
        return Err(FunctionError::UndefinedOutput {
            function: function(),
            index,
        });
    }
    if let Some(&index) = ctx
        .non_differentiable
        .iter()
        .find(|&&index| index >= outputs.len())
    {
        return Err(FunctionError::NoSuchOutput {
            function: function(),
            index,
            outputs: outputs.len(),
        });
    }
    if let Some(index) = self::versions(inputs)
        .iter()
        .zip(&versions)
        .position(|(a, b)| a != b)
    {
        return Err(FunctionError::InputModified {
            function: function(),
            index,
        });
    }
    Ok(FinishedForward { ctx, outputs })
}

/// torch's modification counters; `None` for tensors that have none.
fn versions(inputs: &[Option<&Tensor>]) -> Vec<Option<i64>> {
    inputs
        .iter()
        .map(|input| input.and_then(|input| input.f_internal_version().ok()))
        .collect()
}

impl FinishedForward {
    fn attach<B>(
        self,
        name: &str,
        inputs: &[Option<&Tensor>],
        backward: B,
    ) -> Result<Vec<Tensor>, FunctionError>
    where
        B: Fn(&BackwardContext, &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, FunctionError>
            + Send
            + 'static,
    {
        let Self { ctx, mut outputs } = self;
        let mut non_differentiable = vec![false; outputs.len()];
        for index in ctx.non_differentiable {
            non_differentiable[index] = true;
        }
        ffi::attach(
            name,
            inputs,
            &mut outputs,
            &non_differentiable,
            &ctx.saved,
            Box::new(backward),
        )
        .map_err(|message| FunctionError::Attach {
            function: name.to_owned(),
            message,
        })?;
        Ok(outputs)
    }
}
