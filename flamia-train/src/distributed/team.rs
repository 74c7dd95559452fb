//! The ranks once they have met: what rank 0 decides, what all agree on, and how they part.

use std::time::Duration;

use flamia_autograd::distributed::{Backend, DistributedError, Group, Member, Store};
use tch::{Device, TchError, Tensor};

use super::heart::{Heart, Verdict};
use super::world::{World, WorldError};
use crate::settings::DistributedSettings;

/// Why ranks do not work together.
#[derive(Debug, thiserror::Error)]
pub enum TeamError {
    /// What the launcher says.
    #[error(transparent)]
    World(#[from] WorldError),
    /// The store or an operation.
    #[error(transparent)]
    Distributed(#[from] DistributedError),
    /// The thread that watches the others.
    #[error("cannot start the thread that watches the other ranks")]
    Thread(#[source] std::io::Error),
    /// A rank that was never started, or has another address.
    #[error(
        "rank {rank} of {world} has waited {seconds} s for rank {missing}, which has not come: has it been \
         started, with the same MASTER_ADDR and MASTER_PORT? --distributed-patience waits longer"
    )]
    Missing {
        /// Who tells it.
        rank: usize,
        /// How many there should be.
        world: usize,
        /// Who is missing.
        missing: usize,
        /// For how long it was waited.
        seconds: f64,
    },
    /// Ranks that would train something else.
    #[error(
        "rank {rank} has other {what} than rank 0: give all ranks the same flags, settings file, \
         FLAMIA_ variables and data"
    )]
    Other {
        /// Who tells it.
        rank: usize,
        /// What differs.
        what: &'static str,
    },
    /// Numbers to agree on.
    #[error("torch refused what ranks are to agree on")]
    Torch(#[from] TchError),
}

/// Ranks that have met, seen from one of them.
#[derive(Debug)]
pub struct Team {
    world: World,
    store: Store,
    heart: Heart,
    /// For numbers that hosts agree on, whatever carries the gradients.
    control: Group,
    lost_after: Duration,
    patience: Duration,
}

impl Team {
    /// Waits for all ranks of `world`. From here on `on_verdict` is called, on a thread of its own, if a
    /// rank fails or is lost.
    ///
    /// # Errors
    /// [`TeamError`].
    pub fn join(
        world: World,
        settings: &DistributedSettings,
        on_verdict: impl FnOnce(&Verdict) + Send + 'static,
    ) -> Result<Self, TeamError> {
        let member = world.member;
        let rank = member.rank;
        let lost_after = Duration::from_secs_f64(settings.lost_after);
        let patience = Duration::from_secs_f64(settings.patience);
        let open = |serves, timeout| {
            let store = Store::open(world.store.clone(), rank, serves, timeout)?;
            Ok::<_, DistributedError>(store.under(&format!("attempt {}", world.restarts)))
        };
        let store = open(world.serves, patience)?;
        // Its requests fail in the time in which a rank that does not answer is lost.
        let line = open(false, lost_after)?;
        let heart = Heart::start(line, member, lost_after, on_verdict)?;
        store.set(&here(rank), b"")?;
        for other in 0..member.world {
            store
                .get(&here(other), patience)
                .map_err(|_| TeamError::Missing {
                    rank,
                    world: member.world,
                    missing: other,
                    seconds: settings.patience,
                })?;
        }
        let control = Group::join(&store, "control", member, Backend::Gloo, 0, patience)?;
        Ok(Self {
            world,
            store,
            heart,
            control,
            lost_after,
            patience,
        })
    }

    /// Who this is.
    pub fn member(&self) -> Member {
        self.world.member
    }

    /// What the launcher said.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Whether this is rank 0, which decides and writes.
    pub fn leads(&self) -> bool {
        self.world.member.rank == 0
    }

    /// Says what this rank does, for others to tell if it is lost.
    pub fn doing(&self, what: &str) {
        self.heart.doing(what);
    }

    /// What rank 0 says about `topic`: `decide` is called there, and there alone.
    ///
    /// # Errors
    /// `decide`'s, or [`TeamError`] when rank 0 cannot be heard.
    pub fn decided<E: From<TeamError>>(
        &self,
        topic: &str,
        decide: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        let key = format!("decided/{topic}");
        if self.leads() {
            let decision = decide()?;
            self.store
                .set(&key, decision.as_bytes())
                .map_err(TeamError::from)?;
            return Ok(decision);
        }
        let heard = self.store.get(&key, self.patience);
        let heard = heard.map_err(TeamError::from)?;
        Ok(String::from_utf8_lossy(&heard).into_owned())
    }

    /// Refuses to go on if `mine` is not what rank 0 has.
    ///
    /// # Errors
    /// [`TeamError::Other`].
    pub fn same(&self, what: &'static str, mine: &str) -> Result<(), TeamError> {
        let theirs = self.decided::<TeamError>(what, || Ok(mine.into()))?;
        match theirs == mine {
            true => Ok(()),
            false => Err(TeamError::Other {
                rank: self.member().rank,
                what,
            }),
        }
    }

    /// The sums over ranks of `mine`: the same bits on every rank.
    ///
    /// # Errors
    /// [`TeamError`] when a rank does not answer.
    pub fn sums<const N: usize>(&self, mine: [f64; N]) -> Result<[f64; N], TeamError> {
        let sums = Tensor::f_from_slice(&mine)?;
        self.control.all_reduce(&sums)?.wait()?;
        let mut found = [0.0; N];
        sums.f_copy_data(&mut found, N)?;
        Ok(found)
    }

    /// Waits for all ranks.
    ///
    /// # Errors
    /// [`TeamError`] when one does not come.
    pub fn meet(&self) -> Result<(), TeamError> {
        Ok(self.control.barrier()?)
    }

    /// The group that carries tensors of `device`: NCCL's or, on CPUs, Gloo's.
    ///
    /// # Errors
    /// [`TeamError`], for one when torch lacks it.
    pub fn group(&self, device: Device) -> Result<Group, TeamError> {
        let (backend, gpu) = match device {
            Device::Cuda(gpu) => (Backend::Nccl, gpu),
            _ => (Backend::Gloo, 0),
        };
        let member = self.member();
        let group = Group::join(&self.store, "tensors", member, backend, gpu, self.patience);
        Ok(group?)
    }

    /// Ends with an error, which all others learn. When an operation failed, that is most often the end of
    /// another rank: its verdict, which may come a while later, says more.
    pub fn fail(self, why: &str, is_operation: bool) {
        if is_operation {
            self.heart.wait_for_verdict(self.lost_after);
        }
        self.heart.fail(why);
    }

    /// Parts from the others when all are done.
    ///
    /// # Errors
    /// [`TeamError`] when one does not come to that.
    pub fn leave(self) -> Result<(), TeamError> {
        self.meet()?;
        self.heart.leave();
        let Member { rank, world } = self.world.member;
        self.store.set(&gone(rank), b"")?;
        if self.world.serves {
            for other in 0..world {
                // The server goes last. Who does not say so has ended in another way, and it is all the same.
                if self.store.get(&gone(other), self.lost_after).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }
}

fn here(rank: usize) -> String {
    format!("here/{rank}")
}

fn gone(rank: usize) -> String {
    format!("gone/{rank}")
}
