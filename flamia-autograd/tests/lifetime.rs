//! When the Rust state and the saved tensors are dropped.

mod common;

use std::sync::{Arc, Mutex};
use std::thread;

use common::{Alive, Product, leaf, one, values};
use flamia_autograd::{BackwardContext, ForwardContext, Function, FunctionError, apply, apply_fn};
use tch::{Kind, Tensor};

fn counted_product(alive: &Alive, a: &Tensor, b: &Tensor) -> Tensor {
    one(apply(
        Product {
            token: Some(alive.token()),
        },
        &[Some(a), Some(b)],
    ))
    .unwrap()
}

#[test]
fn without_a_graph_the_state_is_dropped_at_once() {
    let alive = Alive::default();
    let x = leaf(&[3]);

    let y = tch::no_grad(|| counted_product(&alive, &x, &x));
    assert_eq!(alive.count(), 0);
    assert!(!y.requires_grad());
    assert_eq!(values(&y), values(&x.square()));

    let constant = x.detach();
    let y = counted_product(&alive, &constant, &constant);
    assert_eq!(alive.count(), 0);
    assert!(!y.requires_grad());
}

#[test]
fn the_state_lives_until_backward_or_until_the_graph_goes() {
    let alive = Alive::default();
    let x = leaf(&[3]);

    let y = counted_product(&alive, &x, &x);
    assert_eq!(alive.count(), 1);
    drop(y);
    assert_eq!(alive.count(), 0);

    let loss = counted_product(&alive, &x, &x).sum(Kind::Double);
    let _ = Tensor::run_backward(&[&loss], &[&x], true, false);
    assert_eq!(alive.count(), 1, "the graph was kept");
    loss.backward();
    assert_eq!(
        alive.count(),
        0,
        "the graph was released, though the loss lives"
    );
}

#[test]
fn a_failed_backward_leaks_nothing() {
    let alive = Alive::default();
    for _ in 0..100 {
        let x = leaf(&[3]);
        let token = alive.token();
        let y = apply_fn(
            "failing",
            &[Some(&x)],
            |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
            move |_, _| {
                let _ = &token;
                Err(FunctionError::custom("no"))
            },
        )
        .unwrap();
        assert!(y[0].sum(Kind::Double).f_backward().is_err());
    }
    assert_eq!(alive.count(), 0);
}

/// `exp(x)`; how it keeps its output for backward is up to `keep`.
fn exp_keeping<K>(alive: &Alive, x: &Tensor, keep: K) -> Result<Tensor, FunctionError>
where
    K: FnOnce(&mut ForwardContext, &Tensor),
{
    let token = alive.token();
    one(apply_fn(
        "exp",
        &[Some(x)],
        |ctx, inputs| {
            let y = inputs[0].unwrap().exp();
            keep(ctx, &y);
            Ok(vec![y])
        },
        move |ctx, grads| {
            let _ = &token;
            Ok(vec![grads[0].as_ref().map(|grad| grad * &ctx.saved()[0])])
        },
    ))
}

#[test]
fn a_saved_output_makes_no_cycle() {
    let alive = Alive::default();
    let x = leaf(&[3]);
    let y = exp_keeping(&alive, &x, |ctx, y| ctx.save_for_backward(&[y])).unwrap();
    assert_eq!(alive.count(), 1);
    drop(y);
    assert_eq!(alive.count(), 0);

    let y = exp_keeping(&alive, &x, |ctx, y| ctx.save_for_backward(&[y, y])).unwrap();
    y.sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), values(&y));
    drop(y);
    assert_eq!(alive.count(), 0);
}

#[test]
fn an_output_kept_elsewhere_is_refused() {
    let alive = Alive::default();
    let x = leaf(&[3]);
    let error = exp_keeping(&alive, &x, |ctx, y| ctx.save_for_backward(&[&y.view([-1])]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("output 0 is still held"), "{error}");
    assert!(error.contains("save_for_backward"), "{error}");

    /// Keeps its output in itself.
    struct Selfish(Option<Tensor>, #[expect(dead_code)] common::Token);
    impl Function for Selfish {
        fn forward(
            &mut self,
            _: &mut ForwardContext,
            inputs: &[Option<&Tensor>],
        ) -> Result<Vec<Tensor>, FunctionError> {
            let y = inputs[0].unwrap().exp();
            self.0 = Some(y.shallow_clone());
            Ok(vec![y])
        }

        fn backward(
            &self,
            _: &BackwardContext,
            grads: &[Option<Tensor>],
        ) -> Result<Vec<Option<Tensor>>, FunctionError> {
            Ok(vec![
                grads[0]
                    .as_ref()
                    .map(|grad| grad * self.0.as_ref().unwrap()),
            ])
        }
    }
    let error = apply(Selfish(None, alive.token()), &[Some(&x)])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("output 0 is still held 1 time(s)"),
        "{error}"
    );
    assert_eq!(alive.count(), 0);

    // Without a graph there is no cycle to make.
    let y = tch::no_grad(|| apply(Selfish(None, alive.token()), &[Some(&x)])).unwrap();
    assert_eq!(values(&y[0]), values(&x.exp()));
}

/// Each node keeps the one before it alive; freeing them must not recurse.
#[test]
fn a_deep_graph_is_freed_and_differentiated_on_a_small_stack() {
    const DEPTH: usize = 10_000;
    let alive = Alive::default();
    let build = || {
        let x = leaf(&[1]);
        let mut y = x.shallow_clone();
        for _ in 0..DEPTH {
            let token = alive.token();
            let kept = y.shallow_clone();
            y = one(apply_fn(
                "shift",
                &[Some(&y)],
                |ctx, inputs| {
                    ctx.save_for_backward(&[inputs[0].unwrap()]);
                    Ok(vec![inputs[0].unwrap() + 1.0])
                },
                move |_, grads| {
                    let _ = (&token, &kept);
                    Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
                },
            ))
            .unwrap();
        }
        (x, y)
    };

    let on_small_stack = |body: Box<dyn FnOnce() + Send>| {
        thread::Builder::new()
            .stack_size(128 * 1024)
            .spawn(body)
            .unwrap()
            .join()
            .unwrap();
    };
    let (_, y) = build();
    assert_eq!(alive.count(), DEPTH);
    on_small_stack(Box::new(move || drop(y)));
    assert_eq!(alive.count(), 0);

    let (x, y) = build();
    on_small_stack(Box::new(move || {
        y.f_backward().unwrap();
        assert_eq!(values(&x.grad()), [1.0]);
    }));
    assert_eq!(alive.count(), 0);
}

#[test]
fn a_panicking_drop_of_the_state_is_contained() {
    struct Bomb(Arc<Mutex<bool>>);
    impl Drop for Bomb {
        fn drop(&mut self) {
            *self.0.lock().unwrap() = true;
            panic!("bomb");
        }
    }
    let exploded = Arc::new(Mutex::new(false));
    let bomb = Bomb(exploded.clone());
    let x = leaf(&[2]);
    let y = apply_fn(
        "bomb",
        &[Some(&x)],
        |_, inputs| Ok(vec![inputs[0].unwrap() * 1.0]),
        move |_, grads| {
            let _ = &bomb;
            Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
        },
    )
    .unwrap();
    y[0].sum(Kind::Double).f_backward().unwrap();
    assert!(*exploded.lock().unwrap());
    assert_eq!(values(&x.grad()), [1.0; 2]);
}
