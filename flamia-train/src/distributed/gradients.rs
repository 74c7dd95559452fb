//! Gradients summed over ranks while the backward goes on.
//!
//! torch calls a hook when a parameter's gradient is whole. When that is so for all of a bucket, it is sent off: each
//! rank gets the sum of its part (reduce-scatter). Buckets are sent in one order, on every rank.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flamia_autograd::GradientHook;
use flamia_autograd::distributed::{DistributedError, Group, Member, Work};
use tch::{TchError, Tensor};

use super::flat::{Bucket, slice};
use crate::model::Params;

/// Sends gradients, and keeps the group that they are sent through.
#[derive(Debug)]
pub struct Reducer {
    state: Arc<Mutex<State>>,
    /// They end with this value.
    _hooks: Vec<GradientHook>,
}

#[derive(Debug)]
struct State {
    group: Group,
    buckets: Vec<Sending>,
    /// The bucket to be sent next.
    next: usize,
    /// Whether the backward that goes on is the last of its step.
    is_last: bool,
}

#[derive(Debug)]
struct Sending {
    grads: Tensor,
    /// The part of `grads` that is this rank's.
    part: Tensor,
    params: usize,
    /// Parameters whose gradient is not whole.
    missing: usize,
    work: Option<Work>,
}

impl State {
    /// Sends what is whole, in order.
    fn send_whole(&mut self) -> Result<(), DistributedError> {
        while let Some(bucket) = self.buckets.get_mut(self.next)
            && bucket.missing == 0
        {
            bucket.work = Some(self.group.reduce_scatter(&bucket.part, &bucket.grads)?);
            self.next += 1;
        }
        Ok(())
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    // A panic in a hook ends the step with an error.
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reducer {
    /// Hooks the reducer into `params`, which live in `buckets`.
    ///
    /// # Errors
    /// When torch refuses.
    pub fn new(
        group: Group,
        params: &Params,
        buckets: &[Bucket],
        member: Member,
    ) -> Result<Self, TchError> {
        let sending = buckets.iter().map(|bucket| {
            Ok(Sending {
                grads: bucket.grads.shallow_clone(),
                part: slice(&bucket.grads, &bucket.plan.part(member))?,
                params: bucket.plan.places.len(),
                missing: 0,
                work: None,
            })
        });
        let state = Arc::new(Mutex::new(State {
            group,
            buckets: sending.collect::<Result<_, TchError>>()?,
            next: 0,
            is_last: false,
        }));
        let leaves: Vec<&Tensor> = params.iter().map(|(_, param)| param).collect();
        let mut hooks = Vec::new();
        for (index, bucket) in buckets.iter().enumerate() {
            for place in &bucket.plan.places {
                let state = state.clone();
                hooks.push(GradientHook::new(leaves[place.param], move || {
                    let mut state = locked(&state);
                    if !state.is_last {
                        return Ok(());
                    }
                    let missing = &mut state.buckets[index].missing;
                    *missing = missing.saturating_sub(1);
                    state.send_whole().map_err(|error| error.to_string())
                })?);
            }
        }
        Ok(Self {
            state,
            _hooks: hooks,
        })
    }

    /// Says that the next backward is the last of its step.
    pub fn before_last_backward(&self) {
        let mut state = locked(&self.state);
        state.is_last = true;
        state.next = 0;
        for bucket in &mut state.buckets {
            bucket.missing = bucket.params;
            bucket.work = None;
        }
    }

    /// Waits until this rank's part of every bucket is the sum over ranks; other parts are spoilt.
    ///
    /// # Errors
    /// [`DistributedError`].
    pub fn wait(&self) -> Result<(), DistributedError> {
        let mut state = locked(&self.state);
        state.is_last = false;
        // A parameter that had no part in the loss has told nothing; its gradient is zero.
        for bucket in &mut state.buckets {
            bucket.missing = 0;
        }
        state.send_whole()?;
        let works: Vec<Work> = state
            .buckets
            .iter_mut()
            .filter_map(|b| b.work.take())
            .collect();
        works.into_iter().try_for_each(Work::wait)
    }

    /// Does something else with the group.
    pub fn with_group<R>(&self, act: impl FnOnce(&Group) -> R) -> R {
        act(&locked(&self.state).group)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use flamia_autograd::apply_fn;
    use flamia_autograd::distributed::{Backend, Store, StoreAddress};
    use tch::{Device, Kind};

    use super::*;
    use crate::model::{Init, ParamSpec};

    struct Fixture {
        params: Params,
        reducer: Reducer,
        _server: Store,
    }

    /// Parameters of five ones, a bucket each, of one rank.
    fn fixture(names: &[&str]) -> Fixture {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = StoreAddress {
            host: "127.0.0.1".into(),
            port: listener.local_addr().unwrap().port(),
        };
        drop(listener);
        let patience = Duration::from_secs(20);
        let server = Store::open(address, 0, true, patience).unwrap();
        let member = Member { rank: 0, world: 1 };
        let group = Group::join(&server, "test", member, Backend::Gloo, 0, patience).unwrap();
        let specs = names.iter().map(|&name| ParamSpec {
            name: name.into(),
            shape: vec![5],
            init: Init::Ones,
        });
        let mut params = Params::init(&specs.collect::<Vec<_>>(), 0, Device::Cpu).unwrap();
        let buckets = Bucket::all(&mut params, 1, 1).unwrap();
        assert_eq!(buckets.len(), names.len());
        let reducer = Reducer::new(group, &params, &buckets, member).unwrap();
        Fixture {
            params,
            reducer,
            _server: server,
        }
    }

    impl Fixture {
        /// A backward in which the gradient of `second` is whole before that of `first`. Returns how many
        /// buckets had been sent in between.
        fn backward(&self, is_last: bool) -> usize {
            let (sender, receiver) = channel();
            let state = self.reducer.state.clone();
            let product = self.params.get("first") * 3.0;
            let looked_at = apply_fn(
                "look",
                &[Some(&product)],
                |_, inputs| Ok(inputs.iter().flatten().map(|&x| x * 1.0).collect()),
                move |_, grads| {
                    sender.send(locked(&state).next).unwrap();
                    Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone)])
                },
            );
            let loss = looked_at.unwrap().swap_remove(0) * self.params.get("second");
            if is_last {
                self.reducer.before_last_backward();
            }
            loss.sum(Kind::Float).backward();
            receiver.recv().unwrap()
        }

        /// Buckets that have been sent.
        fn sent(&self) -> usize {
            locked(&self.reducer.state).next
        }

        fn gradient(&self, name: &str) -> Vec<f32> {
            Vec::try_from(self.params.get(name).grad()).unwrap()
        }
    }

    #[test]
    fn a_bucket_is_sent_while_the_last_backward_goes_on() {
        let two = fixture(&["first", "second"]);
        assert_eq!(two.backward(false), 0);
        assert_eq!(two.sent(), 0);
        assert_eq!(two.backward(true), 1);
        assert_eq!(two.sent(), 2);
        two.reducer.wait().unwrap();
        assert_eq!(
            [two.gradient("first"), two.gradient("second")],
            [[6f32; 5]; 2]
        );
    }

    #[test]
    fn what_no_gradient_comes_to_is_sent_in_its_turn_all_the_same() {
        let three = fixture(&["first", "second", "unused"]);
        assert_eq!(three.backward(true), 0, "it is the first in the order");
        assert_eq!(three.sent(), 0);
        three.reducer.wait().unwrap();
        assert_eq!(three.sent(), 3);
        assert_eq!(three.gradient("unused"), [0f32; 5]);
        assert_eq!(three.gradient("first"), [3f32; 5]);
    }
}
