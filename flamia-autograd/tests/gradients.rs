//! Gradients of custom functions, against torch's own and against finite differences.

mod common;

use std::sync::{Arc, Mutex};

use common::{assert_gradients, leaf, one, product, values};
use flamia_autograd::gradcheck::{GradcheckError, gradcheck};
use flamia_autograd::{FunctionError, apply_fn};
use proptest::prelude::*;
use tch::{Kind, Tensor};

/// `(sum a*b, a + b)`, which wants a gradient from each output and copes with one missing.
fn product_and_sum(a: &Tensor, b: &Tensor) -> Result<Vec<Tensor>, FunctionError> {
    apply_fn(
        "product_and_sum",
        &[Some(a), Some(b)],
        |ctx, inputs| {
            let (a, b) = (inputs[0].unwrap(), inputs[1].unwrap());
            ctx.save_for_backward(&[a, b]);
            Ok(vec![a * b, a + b])
        },
        |ctx, grads| {
            let (a, b) = (&ctx.saved()[0], &ctx.saved()[1]);
            let through = |other: &Tensor| {
                let product = grads[0].as_ref().map(|grad| grad * other);
                let sum = grads[1].as_ref().map(Tensor::shallow_clone);
                match (product, sum) {
                    (Some(product), Some(sum)) => Some(product + sum),
                    (product, sum) => product.or(sum),
                }
            };
            Ok(vec![through(b), through(a)])
        },
    )
}

/// `x^3`, differentiable twice because its backward is made of tch operations.
fn cube(x: &Tensor) -> Result<Tensor, FunctionError> {
    one(apply_fn(
        "cube",
        &[Some(x)],
        |ctx, inputs| {
            let x = inputs[0].unwrap();
            ctx.save_for_backward(&[x]);
            Ok(vec![x * x * x])
        },
        |ctx, grads| {
            let x = &ctx.saved()[0];
            Ok(vec![grads[0].as_ref().map(|grad| grad * x * x * 3.0)])
        },
    ))
}

#[test]
fn product_equals_torch() {
    let (a, b) = (leaf(&[3, 4]), leaf(&[3, 4]) + 0.5);
    let b = b.detach().set_requires_grad(true);
    let weights = leaf(&[3, 4]).detach().cos();

    let loss = (product(&a, &b).unwrap() * &weights).sum(Kind::Double);
    let own = Tensor::run_backward(&[loss], &[&a, &b], false, false);
    let loss = (&a * &b * &weights).sum(Kind::Double);
    let torch = Tensor::run_backward(&[loss], &[&a, &b], false, false);

    assert_eq!(values(&own[0]), values(&torch[0]));
    assert_eq!(values(&own[1]), values(&torch[1]));
}

#[test]
fn gradients_of_two_outputs_add_up() {
    let (a, b) = (
        leaf(&[5]),
        leaf(&[5]).cos().detach().set_requires_grad(true),
    );
    let outputs = product_and_sum(&a, &b).unwrap();
    (outputs[0].exp().sum(Kind::Double) + outputs[1].sin().sum(Kind::Double)).backward();
    let own = (values(&a.grad()), values(&b.grad()));

    let (mut a, mut b) = (a, b);
    a.zero_grad();
    b.zero_grad();
    ((&a * &b).exp().sum(Kind::Double) + (&a + &b).sin().sum(Kind::Double)).backward();
    for (own, torch) in own.0.iter().zip(values(&a.grad())) {
        assert!((own - torch).abs() < 1e-14, "{own} {torch}");
    }
    for (own, torch) in own.1.iter().zip(values(&b.grad())) {
        assert!((own - torch).abs() < 1e-14, "{own} {torch}");
    }
}

#[test]
fn an_unused_output_arrives_as_none() {
    let (a, b) = (leaf(&[3]), leaf(&[3]));
    for used in [0, 1] {
        let outputs = product_and_sum(&a, &b).unwrap();
        let grads = Tensor::run_backward(&[outputs[used].sum(Kind::Double)], &[&a], false, false);
        let expected = if used == 0 { values(&b) } else { vec![1.0; 3] };
        assert_eq!(values(&grads[0]), expected);
    }

    let seen = Arc::new(Mutex::new(Vec::new()));
    let outputs = apply_fn(
        "two",
        &[Some(&a)],
        |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0, inputs[0].unwrap() * 2.0]),
        {
            let seen = seen.clone();
            move |_, grads| {
                *seen.lock().unwrap() = grads.iter().map(Option::is_some).collect();
                Ok(vec![None])
            }
        },
    )
    .unwrap();
    outputs[1].sum(Kind::Double).backward();
    assert_eq!(*seen.lock().unwrap(), [false, true]);
}

#[test]
fn only_what_needs_a_gradient_gets_one() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let recorded_product = |a: &Tensor, b: &Tensor| {
        let seen = seen.clone();
        one(apply_fn(
            "product",
            &[Some(a), Some(b)],
            |ctx, inputs| {
                let (a, b) = (inputs[0].unwrap(), inputs[1].unwrap());
                assert_eq!(ctx.needs_input_grad(0), a.requires_grad());
                assert_eq!(ctx.needs_input_grad(1), b.requires_grad());
                assert!(!ctx.needs_input_grad(2));
                ctx.save_for_backward(&[a, b]);
                Ok(vec![a * b])
            },
            move |ctx, grads| {
                *seen.lock().unwrap() = (0..3).map(|i| ctx.needs_input_grad(i)).collect();
                let grad = grads[0].as_ref().unwrap();
                Ok(vec![
                    Some(grad * &ctx.saved()[1]),
                    Some(grad * &ctx.saved()[0]),
                ])
            },
        ))
        .unwrap()
        .sum(Kind::Double)
    };

    let (a, b) = (leaf(&[4]), leaf(&[4]));
    let constant = b.detach();
    // A gradient for the constant is returned and ignored.
    recorded_product(&a, &constant).backward();
    assert_eq!(*seen.lock().unwrap(), [true, false, false]);
    assert_eq!(values(&a.grad()), values(&b));
    assert!(!constant.grad().defined());

    // Both require grad, one is asked for.
    let grads = Tensor::run_backward(&[recorded_product(&a, &b)], &[&b], false, false);
    assert_eq!(*seen.lock().unwrap(), [false, true, false]);
    assert_eq!(values(&grads[0]), values(&a));
}

/// Rows of `table` at `index`, plus an optional bias.
fn lookup(table: &Tensor, index: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, FunctionError> {
    one(apply_fn(
        "lookup",
        &[Some(table), Some(index), bias],
        |ctx, inputs| {
            let (table, index) = (inputs[0].unwrap(), inputs[1].unwrap());
            ctx.save_for_backward(&[table, index]);
            let rows = table.f_index_select(0, index)?;
            Ok(vec![match inputs[2] {
                Some(bias) => rows + bias,
                None => rows,
            }])
        },
        |ctx, grads| {
            let (table, index) = (&ctx.saved()[0], &ctx.saved()[1]);
            let grad = grads[0].as_ref().unwrap();
            let table_grad = table.zeros_like().f_index_add(0, index, grad)?;
            // torch sums this one over the rows that the bias was broadcast to.
            let bias_grad = ctx.needs_input_grad(2).then(|| grad.shallow_clone());
            Ok(vec![Some(table_grad), None, bias_grad])
        },
    ))
}

#[test]
fn integer_and_absent_inputs() {
    let table = leaf(&[4, 3]);
    let index = Tensor::from_slice(&[2i64, 0, 2]);

    lookup(&table, &index, None)
        .unwrap()
        .sum(Kind::Double)
        .backward();
    let expected: Vec<f64> = [1.0, 0.0, 2.0, 0.0]
        .iter()
        .flat_map(|&count| [count; 3])
        .collect();
    assert_eq!(values(&table.grad()), expected);

    let bias = leaf(&[3]);
    assert_gradients(
        |x| Ok(vec![lookup(&x[0], &index, Some(&x[1]))?]),
        &[table, bias],
    );
}

#[test]
fn the_same_input_twice() {
    let x = leaf(&[6]);
    product(&x, &x).unwrap().sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), values(&(&x * 2.0)));
}

#[test]
fn an_output_may_be_an_input_or_a_view_of_one() {
    let identity = |x: &Tensor| {
        one(apply_fn(
            "twice_backward",
            &[Some(x)],
            |_, inputs| Ok(vec![inputs[0].unwrap().shallow_clone()]),
            |_, grads| Ok(vec![grads[0].as_ref().map(|grad| grad * 2.0)]),
        ))
        .unwrap()
    };
    let x = leaf(&[3]);
    let y = identity(&x);
    assert!(!y.is_leaf() && x.is_leaf());
    y.sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), [2.0; 3]);
    tch::no_grad(|| assert!(!identity(&x).requires_grad()));

    let transpose = |x: &Tensor| {
        one(apply_fn(
            "transpose",
            &[Some(x)],
            |_, inputs| Ok(vec![inputs[0].unwrap().transpose(0, 1)]),
            |_, grads| Ok(vec![grads[0].as_ref().map(|grad| grad.transpose(0, 1))]),
        ))
    };
    assert_gradients(|x| Ok(vec![transpose(&x[0])?.sin()]), &[leaf(&[2, 3])]);
}

#[test]
fn saved_outputs_and_intermediates() {
    let exp_sin = |x: &Tensor| {
        one(apply_fn(
            "exp_sin",
            &[Some(x)],
            |ctx, inputs| {
                let x = inputs[0].unwrap();
                let cos = x.cos();
                let y = x.sin().exp();
                ctx.save_for_backward(&[&y]);
                ctx.save_for_backward(&[&cos]);
                Ok(vec![y])
            },
            |ctx, grads| {
                let [y, cos] = ctx.saved() else {
                    return Err(FunctionError::custom("y, cos"));
                };
                Ok(vec![grads[0].as_ref().map(|grad| grad * y * cos)])
            },
        ))
    };
    assert_gradients(|x| Ok(vec![exp_sin(&x[0])?]), &[leaf(&[2, 4])]);
    // In a chain, non-leaf inputs are saved.
    assert_gradients(
        |x| Ok(vec![exp_sin(&exp_sin(&x[0])?.tanh())?]),
        &[leaf(&[5])],
    );
}

#[test]
fn an_undefined_tensor_stays_undefined() {
    let x = leaf(&[2]);
    let y = one(apply_fn(
        "undefined",
        &[Some(&x), Some(&Tensor::new())],
        |ctx, inputs| {
            ctx.save_for_backward(&[inputs[1].unwrap(), inputs[0].unwrap()]);
            Ok(vec![inputs[0].unwrap().square()])
        },
        |ctx, grads| {
            assert!(!ctx.saved()[0].defined());
            let grad = grads[0].as_ref().map(|grad| grad * &ctx.saved()[1] * 2.0);
            Ok(vec![grad, None])
        },
    ))
    .unwrap();
    y.sum(Kind::Double).f_backward().unwrap();
    assert_eq!(values(&x.grad()), values(&(&x * 2.0)));
}

#[test]
fn non_differentiable_outputs() {
    let max_and_count = |x: &Tensor| {
        apply_fn(
            "max_and_count",
            &[Some(x)],
            |ctx, inputs| {
                let x = inputs[0].unwrap();
                ctx.mark_non_differentiable(1);
                Ok(vec![x * 3.0, x.abs(), x.argmax(0, false)])
            },
            |_, grads| {
                assert!(grads[1].is_none() && grads[2].is_none());
                Ok(vec![grads[0].as_ref().map(|grad| grad * 3.0)])
            },
        )
        .unwrap()
    };
    let x = leaf(&[4]);
    let outputs = max_and_count(&x);
    assert_eq!(
        outputs
            .iter()
            .map(Tensor::requires_grad)
            .collect::<Vec<_>>(),
        [true, false, false]
    );
    (&outputs[0] * &outputs[1]).sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), values(&(x.abs() * 3.0)));
}

#[test]
fn a_gradient_is_summed_and_cast_as_torch_does() {
    let (row, matrix) = (leaf(&[3]), leaf(&[2, 3]));
    product(&row, &matrix).unwrap().sum(Kind::Double).backward();
    assert_eq!(row.grad().size(), [3]);
    assert_gradients(|x| Ok(vec![product(&x[0], &x[1])?]), &[row, matrix]);

    let x = leaf(&[3])
        .to_kind(Kind::Float)
        .detach()
        .set_requires_grad(true);
    let y = apply_fn(
        "double_gradient",
        &[Some(&x)],
        |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
        |_, grads| {
            Ok(vec![
                grads[0]
                    .as_ref()
                    .map(|grad| grad.to_kind(Kind::Double) * 0.5),
            ])
        },
    )
    .unwrap();
    y[0].sum(Kind::Float).backward();
    assert_eq!(x.grad().kind(), Kind::Float);
    assert_eq!(values(&x.grad()), [0.5; 3]);
}

#[test]
fn second_derivatives_of_a_differentiable_backward() {
    let x = leaf(&[4]);
    let y = cube(&x).unwrap().sum(Kind::Double);
    let first = Tensor::run_backward(&[y], &[&x], true, true);
    let second = Tensor::run_backward(&[first[0].sum(Kind::Double)], &[&x], false, false);
    for (second, x) in values(&second[0]).iter().zip(values(&x)) {
        assert!((second - 6.0 * x).abs() < 1e-12, "{second} at {x}");
    }

    let enabled = Arc::new(Mutex::new(Vec::new()));
    for create_graph in [false, true] {
        let enabled = enabled.clone();
        let y = apply_fn(
            "record_grad_mode",
            &[Some(&x)],
            |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
            move |ctx, grads| {
                enabled.lock().unwrap().push(ctx.grad_enabled());
                Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
            },
        )
        .unwrap();
        let _ = Tensor::run_backward(&[y[0].sum(Kind::Double)], &[&x], true, create_graph);
    }
    assert_eq!(*enabled.lock().unwrap(), [false, true]);
}

/// A backward may itself run the engine, as recomputing a forward does.
#[test]
fn a_backward_that_runs_backward() {
    let recomputed = |x: &Tensor| {
        one(apply_fn(
            "recomputed",
            &[Some(x)],
            |ctx, inputs| {
                ctx.save_for_backward(&[inputs[0].unwrap()]);
                Ok(vec![inputs[0].unwrap().sin().exp()])
            },
            |ctx, grads| {
                let x = ctx.saved()[0].detach().set_requires_grad(true);
                let y = tch::with_grad(|| x.sin().exp() * grads[0].as_ref().unwrap());
                let y = tch::with_grad(|| y.sum(Kind::Double));
                Ok(Tensor::f_run_backward(&[y], &[&x], false, false)?
                    .into_iter()
                    .map(Some)
                    .collect())
            },
        ))
    };
    assert_gradients(
        |x| Ok(vec![recomputed(&recomputed(&x[0])?.cos())?]),
        &[leaf(&[4])],
    );
}

#[test]
fn gradcheck_sees_wrong_gradients() {
    let scaled = |factor: f64| {
        move |x: &[Tensor]| {
            apply_fn(
                "square",
                &[Some(&x[0])],
                |ctx, inputs| {
                    ctx.save_for_backward(&[inputs[0].unwrap()]);
                    Ok(vec![inputs[0].unwrap().square()])
                },
                move |ctx, grads| {
                    Ok(vec![
                        grads[0]
                            .as_ref()
                            .map(|grad| grad * &ctx.saved()[0] * factor),
                    ])
                },
            )
        }
    };
    let x = [leaf(&[3])];
    gradcheck(scaled(2.0), &x, 1e-6, 1e-8, 1e-6).unwrap();
    for factor in [2.001, 0.0, f64::NAN] {
        let error = gradcheck(scaled(factor), &x, 1e-6, 1e-8, 1e-6).unwrap_err();
        assert!(
            matches!(
                error,
                GradcheckError::Mismatch {
                    input: 0,
                    output: 0,
                    ..
                }
            ),
            "{error}"
        );
    }
    // Nothing to compare is not a pass, and single precision is refused.
    let error = gradcheck(scaled(2.0), &[x[0].detach()], 1e-6, 1e-8, 1e-6).unwrap_err();
    assert!(matches!(error, GradcheckError::NothingToCheck), "{error}");
    let single = x[0].to_kind(Kind::Float).detach().set_requires_grad(true);
    let error = gradcheck(scaled(2.0), &[single], 1e-6, 1e-8, 1e-6).unwrap_err();
    assert!(
        matches!(error, GradcheckError::NotDouble { input: 0, .. }),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any shape, broadcasting and empty tensors included.
    #[test]
    fn product_equals_torch_for_every_shape(
        dims in prop::collection::vec((0i64..4, 0u8..4), 0..4)
    ) {
        let full: Vec<i64> = dims.iter().map(|&(size, _)| size).collect();
        let shape = |bit: u8| -> Vec<i64> {
            dims.iter().map(|&(size, ones)| if ones & bit != 0 { 1 } else { size }).collect()
        };
        let (a, b) = (leaf(&shape(1)), leaf(&shape(2)));
        let own = product(&a, &b).unwrap();
        let torch = &a * &b;
        if dims.iter().all(|&(_, ones)| ones != 3) {
            prop_assert_eq!(own.size(), full);
        }
        let own = Tensor::run_backward(&[own.sin().sum(Kind::Double)], &[&a, &b], false, false);
        let torch =
            Tensor::run_backward(&[torch.sin().sum(Kind::Double)], &[&a, &b], false, false);
        for (own, torch) in own.iter().zip(&torch) {
            prop_assert_eq!(own.size(), torch.size());
            for (own, torch) in values(own).iter().zip(values(torch)) {
                prop_assert!((own - torch).abs() <= 1e-12, "{} {}", own, torch);
            }
        }
    }
}
