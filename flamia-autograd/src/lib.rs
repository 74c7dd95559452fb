//! A general autograd Function for tch, and low-bit attention on top of it.
//!
//! tch can run torch's autograd engine but not extend it. Here a Rust type with a forward and a
//! backward becomes a node of torch's own graph: see [`Function`] and [`apply`], or [`apply_fn`]
//! for two closures. [`attention`] is one. [`gradcheck`](gradcheck::gradcheck) tests a backward against finite
//! differences, and [`load_cuda`] lets one binary run with and without a GPU. [`peers`] is torch's own
//! attention on GPUs, [`flash_attention`] one of them in the graph, and [`TorchStream`] a stream that torch and other libraries share.
//! [`distributed`] is torch's engine for several processes, and [`GradientHook`] tells when a gradient can be sent.
//!
//! ```no_run
//! use flamia_autograd::{BackwardContext, ForwardContext, Function, FunctionError, apply};
//! use tch::{Kind, Tensor};
//!
//! /// `y = scale * x^2`. The value carries what backward needs besides tensors.
//! struct ScaledSquare {
//!     scale: f64,
//! }
//!
//! impl Function for ScaledSquare {
//!     fn forward(
//!         &mut self,
//!         ctx: &mut ForwardContext,
//!         inputs: &[Option<&Tensor>],
//!     ) -> Result<Vec<Tensor>, FunctionError> {
//!         let x = inputs[0].ok_or_else(|| FunctionError::custom("x is required"))?;
//!         ctx.save_for_backward(&[x]);
//!         Ok(vec![x * x * self.scale])
//!     }
//!
//!     fn backward(
//!         &self,
//!         ctx: &BackwardContext,
//!         grads: &[Option<Tensor>],
//!     ) -> Result<Vec<Option<Tensor>>, FunctionError> {
//!         let x = &ctx.saved()[0];
//!         Ok(vec![grads[0].as_ref().map(|grad| grad * x * (2.0 * self.scale))])
//!     }
//! }
//!
//! let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
//! let y = apply(ScaledSquare { scale: 3.0 }, &[Some(&x)])?;
//! y[0].sum(Kind::Double).f_backward()?;
//! assert_eq!(x.grad(), Tensor::from_slice(&[6.0, 12.0]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The same program runs as `cargo run -p flamia-autograd --example scaled_square`.

mod attention;
mod cuda;
pub mod distributed;
mod error;
mod ffi;
mod flash;
mod function;
mod gpu;
pub mod gradcheck;
mod leaf;
mod optim;
pub mod peers;
mod stream;

pub use attention::{AttentionError, attention};
pub use cuda::{CudaLoadError, CurrentStreamError, load_cuda};
pub use error::FunctionError;
pub use ffi::torch_version;
pub use flash::{FlashDocuments, FlashError, flash_attention};
pub use function::{BackwardContext, ForwardContext, Function, apply, apply_fn};
pub use gpu::{GpuCallError, attention_forward, prepare_gpu};
pub use leaf::{GradientHook, leaf_changed, place_leaf};
pub use optim::{FusedAdamW, FusedParam};
pub use stream::{StreamError, TorchMemory, TorchStream, use_gpu};
