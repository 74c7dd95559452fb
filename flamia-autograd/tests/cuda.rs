//! On a GPU the engine runs backward on a thread of its own. `cargo test -- --ignored` on a
//! machine that has one; there a CPU-only run would be a failure, not a skip.

mod common;

use common::{Alive, Product, one, values};
use flamia_autograd::{FunctionError, apply, apply_fn, load_cuda};
use tch::{Device, Kind, Tensor};

#[test]
#[ignore = "needs a GPU"]
fn gradients_errors_and_panics_on_a_gpu() {
    assert_eq!(load_cuda(), Ok(true));
    let device = Device::Cuda(0);
    let leaf = || Tensor::arange(4, (Kind::Double, device)).set_requires_grad(true);

    let alive = Alive::default();
    let x = leaf();
    let y = one(apply(
        Product {
            token: Some(alive.token()),
        },
        &[Some(&x), Some(&x)],
    ))
    .unwrap();
    assert_eq!(y.device(), device);
    y.sum(Kind::Double).f_backward().unwrap();
    assert_eq!(
        values(&x.grad().to_device(Device::Cpu)),
        [0.0, 2.0, 4.0, 6.0]
    );
    assert_eq!(alive.count(), 0);

    type Failure = fn() -> FunctionError;
    let failures: [(Failure, &str); 2] = [
        (
            || FunctionError::custom("no lse"),
            "backward of failing: no lse",
        ),
        (|| panic!("tile 7"), "backward of failing panicked: tile 7"),
    ];
    for (fail, expected) in failures {
        let y = one(apply_fn(
            "failing",
            &[Some(&leaf())],
            |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
            move |_, _| Err(fail()),
        ))
        .unwrap();
        let error = y.sum(Kind::Double).f_backward().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    // A gradient on the wrong device is refused.
    let y = one(apply_fn(
        "wrong_device",
        &[Some(&leaf())],
        |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
        |_, grads| {
            Ok(vec![
                grads[0].as_ref().map(|grad| grad.to_device(Device::Cpu)),
            ])
        },
    ))
    .unwrap();
    let error = y.sum(Kind::Double).f_backward().unwrap_err().to_string();
    assert!(error.contains("wrong_device"), "{error}");
}
