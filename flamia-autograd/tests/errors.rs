//! Everything that can go wrong is an `Err` with a message, and the process carries on.

mod common;

use common::{Alive, Product, leaf, one, product, values};
use flamia_autograd::{FunctionError, apply, apply_fn};
use tch::{Kind, TchError, Tensor};

/// `3 x` whose backward is `backward`.
fn with_backward<B>(x: &Tensor, backward: B) -> Tensor
where
    B: Fn(&[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, FunctionError> + Send + 'static,
{
    one(apply_fn(
        "triple",
        &[Some(x)],
        |_, inputs| Ok(vec![inputs[0].unwrap() * 3.0]),
        move |_, grads| backward(grads),
    ))
    .unwrap()
}

/// The text of the torch error that a failing backward gives, after which a good one must work.
fn backward_error(y: &Tensor) -> String {
    let error = y.sum(Kind::Double).f_backward().unwrap_err();
    let x = leaf(&[2]);
    product(&x, &x)
        .unwrap()
        .sum(Kind::Double)
        .f_backward()
        .unwrap();
    assert_eq!(values(&x.grad()), values(&(&x * 2.0)));
    match error {
        TchError::Torch(text) => text,
        other => panic!("{other:?}"),
    }
}

/// The error of a forward that fails, after which a good one must work with gradients on.
fn forward_error<F>(forward: F) -> FunctionError
where
    F: FnOnce(&Tensor) -> Result<Vec<Tensor>, FunctionError>,
{
    let x = leaf(&[2]);
    let error = apply_fn(
        "failing",
        &[Some(&x)],
        |_, inputs| forward(inputs[0].unwrap()),
        |_, _| Ok(vec![None]),
    )
    .unwrap_err();
    assert!(product(&x, &x).unwrap().requires_grad());
    error
}

#[test]
fn an_error_in_forward_is_returned_as_it_is() {
    let error = forward_error(|_| Err(FunctionError::custom("cu_seqlens must start at 0")));
    assert_eq!(error.to_string(), "cu_seqlens must start at 0");

    let error = forward_error(|x| Ok(vec![x.f_matmul(&leaf(&[3, 3]))?]));
    assert!(
        matches!(&error, FunctionError::Torch(TchError::Torch(_))),
        "{error:?}"
    );
    assert!(
        error.to_string().contains("cannot be multiplied"),
        "{error}"
    );
}

#[test]
fn a_panic_in_forward_is_an_error() {
    let error = forward_error(|_| panic!("head_dim {} is odd", 63));
    assert!(
        matches!(
            error,
            FunctionError::Panic {
                pass: "forward",
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(
        error.to_string(),
        "forward of failing panicked: head_dim 63 is odd"
    );

    // tch's infallible API panics too.
    let error = forward_error(|x| Ok(vec![x.matmul(&leaf(&[3, 3]))]));
    assert!(
        error.to_string().contains("cannot be multiplied"),
        "{error}"
    );
}

#[test]
fn forward_must_return_good_outputs() {
    let error = forward_error(|_| Ok(vec![]));
    assert!(matches!(error, FunctionError::NoOutputs { .. }), "{error}");

    let error = forward_error(|x| Ok(vec![x * 1.0, Tensor::new()]));
    assert!(
        matches!(error, FunctionError::UndefinedOutput { index: 1, .. }),
        "{error}"
    );

    let error = forward_error(|x| {
        let _ = x.detach().fill_(0.0);
        Ok(vec![x * 1.0])
    });
    assert!(
        matches!(error, FunctionError::InputModified { index: 0, .. }),
        "{error}"
    );

    let x = leaf(&[2]);
    let error = apply_fn(
        "marks",
        &[Some(&x)],
        |ctx, inputs| {
            ctx.mark_non_differentiable(1);
            Ok(vec![inputs[0].unwrap() * 1.0])
        },
        |_, _| Ok(vec![None]),
    )
    .unwrap_err();
    assert!(
        matches!(
            error,
            FunctionError::NoSuchOutput {
                index: 1,
                outputs: 1,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn an_error_in_backward_reaches_the_caller() {
    let y = with_backward(&leaf(&[2]), |_| {
        Err(FunctionError::custom("no lse was saved"))
    });
    let text = backward_error(&y);
    assert!(
        text.contains("backward of triple: no lse was saved"),
        "{text}"
    );

    let y = with_backward(&leaf(&[2]), |grads| {
        Ok(vec![Some(
            grads[0].as_ref().unwrap().f_matmul(&leaf(&[3, 3]))?,
        )])
    });
    let text = backward_error(&y);
    assert!(
        text.contains("backward of triple") && text.contains("cannot be multiplied"),
        "{text}"
    );
}

#[test]
fn a_panic_in_backward_is_an_error() {
    let y = with_backward(&leaf(&[2]), |_| panic!("tile {} of 4", 7));
    let text = backward_error(&y);
    assert!(
        text.contains("backward of triple panicked: tile 7 of 4"),
        "{text}"
    );

    let y = with_backward(&leaf(&[2]), |_| std::panic::panic_any(3));
    let text = backward_error(&y);
    assert!(text.contains("backward of triple panicked"), "{text}");
}

#[test]
fn a_failing_backward_in_the_middle_of_a_graph() {
    let x = leaf(&[2]);
    let y = with_backward(&product(&x, &x).unwrap(), |_| {
        Err(FunctionError::custom("stop"))
    });
    let text = backward_error(&product(&y, &y).unwrap().exp());
    assert!(text.contains("backward of triple: stop"), "{text}");
    assert!(!x.grad().defined());
}

#[test]
fn gradients_must_fit_the_inputs() {
    for count in [0, 2] {
        let y = with_backward(&leaf(&[2]), move |grads| {
            Ok((0..count)
                .map(|_| grads[0].as_ref().map(Tensor::shallow_clone))
                .collect())
        });
        let text = backward_error(&y);
        let expected = format!("returned {count} gradient(s) for 1 input(s)");
        assert!(text.contains(&expected), "{text}");
    }

    let y = with_backward(&leaf(&[2]), |_| Ok(vec![Some(leaf(&[5]).detach())]));
    let text = backward_error(&y);
    assert!(
        text.contains("triple") && text.contains("[5]") && text.contains("[2]"),
        "{text}"
    );

    let y = with_backward(&leaf(&[2]), |_| {
        Ok(vec![Some(Tensor::zeros(
            [2],
            (Kind::ComplexDouble, tch::Device::Cpu),
        ))])
    });
    let text = backward_error(&y);
    assert!(text.contains("complex"), "{text}");

    // Undefined means none.
    let x = leaf(&[2]);
    let y = with_backward(&x, |_| Ok(vec![Some(Tensor::new())]));
    y.sum(Kind::Double).f_backward().unwrap();
}

#[test]
fn a_second_backward_needs_the_graph() {
    let x = leaf(&[3]);
    let y = product(&x, &x).unwrap().sum(Kind::Double);
    let first = Tensor::f_run_backward(&[&y], &[&x], true, false).unwrap();
    let second = Tensor::f_run_backward(&[&y], &[&x], false, false).unwrap();
    assert_eq!(values(&first[0]), values(&second[0]));

    // torch's own product says the same.
    let torch = (&x * &x).sum(Kind::Double);
    torch.f_backward().unwrap();
    let torch = torch.f_backward().unwrap_err().to_string();
    let own = Tensor::f_run_backward(&[&y], &[&x], false, false)
        .unwrap_err()
        .to_string();
    assert!(
        own.contains("backward through the graph a second time"),
        "{own}"
    );
    assert_eq!(own.lines().next(), torch.lines().next());

    // Rust state alone is released too.
    let y = with_backward(&x, |grads| {
        Ok(vec![grads[0].as_ref().map(|grad| grad * 3.0)])
    });
    let y = y.sum(Kind::Double);
    y.f_backward().unwrap();
    assert!(y.f_backward().is_err());
}

#[test]
fn a_saved_tensor_must_not_be_modified() {
    let x = leaf(&[3]);
    let y = product(&x, &x).unwrap();
    tch::no_grad(|| {
        let _ = x.shallow_clone().fill_(1.0);
    });
    let text = backward_error(&y);
    assert!(text.contains("modified by an inplace operation"), "{text}");

    // A saved output counts too.
    let x = leaf(&[3]);
    let mut y = one(apply_fn(
        "exp",
        &[Some(&x)],
        |ctx, inputs| {
            let y = inputs[0].unwrap().exp();
            ctx.save_for_backward(&[&y]);
            Ok(vec![y])
        },
        |ctx, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * &ctx.saved()[0])]),
    ))
    .unwrap();
    let _ = y.g_mul_scalar_(2.0);
    let text = backward_error(&y);
    assert!(text.contains("modified by an inplace operation"), "{text}");
}

#[test]
fn the_state_is_dropped_when_apply_fails() {
    let alive = Alive::default();
    let (a, b) = (leaf(&[2]), leaf(&[3]));
    let error = apply(
        Product {
            token: Some(alive.token()),
        },
        &[Some(&a), Some(&b)],
    )
    .unwrap_err();
    assert!(error.to_string().contains("must match the size"), "{error}");
    assert_eq!(alive.count(), 0);

    let error = apply(
        Product {
            token: Some(alive.token()),
        },
        &[Some(&a), None],
    )
    .unwrap_err();
    assert!(matches!(error, FunctionError::Panic { .. }), "{error}");
    assert_eq!(alive.count(), 0);
}
