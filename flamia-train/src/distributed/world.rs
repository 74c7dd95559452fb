//! Who this process is among the ranks, as its launcher says in the environment.

use flamia_autograd::distributed::{Member, StoreAddress};

/// What a launcher tells a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// This rank, and how many there are.
    pub member: Member,
    /// This rank among those of its machine, which is the GPU that it takes.
    pub local_rank: usize,
    /// Ranks of this machine, as far as is known, which share its cores.
    pub local_world: usize,
    /// Where the ranks meet.
    pub store: StoreAddress,
    /// Whether this rank serves that store: rank 0 does, unless its launcher does.
    pub serves: bool,
    /// How often the launcher has started all ranks again, whose store still has what they said before.
    pub restarts: usize,
}

/// Why the environment describes no rank.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorldError {
    /// A variable is missing.
    #[error(
        "{given} is set, so this is one of several ranks, but {missing} is not: set RANK, WORLD_SIZE, \
         MASTER_ADDR and MASTER_PORT (torchrun and `cargo xtask train --nproc N` do), or none of them"
    )]
    Missing {
        /// The variable that says so.
        given: &'static str,
        /// The one that is not set.
        missing: &'static str,
    },
    /// A variable that is no such number.
    #[error("{name} must be {expected}, found {found:?}")]
    NoNumber {
        /// The variable.
        name: &'static str,
        /// What it must be.
        expected: &'static str,
        /// Its value.
        found: String,
    },
    /// A rank past the last.
    #[error("rank {rank} is none of {world}: ranks count from 0")]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// How many there are.
        world: usize,
    },
}

/// The names of the three numbers of a launcher.
struct Names {
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
}

const TORCHRUN: Names = Names {
    rank: "RANK",
    world: "WORLD_SIZE",
    local_rank: "LOCAL_RANK",
};

const SLURM: Names = Names {
    rank: "SLURM_PROCID",
    world: "SLURM_NTASKS",
    local_rank: "SLURM_LOCALID",
};

impl World {
    /// What this process's environment says: `None` if it is alone.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn from_environment() -> Result<Option<Self>, WorldError> {
        Self::from(|name| std::env::var(name).ok())
    }

    /// What `variable` says. RANK, WORLD_SIZE and LOCAL_RANK come first; SLURM's numbers count where
    /// MASTER_ADDR is set, as they are there too for what is alone in an allocation.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn from(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, WorldError> {
        let is_set = |name: &str| variable(name).is_some();
        let names = if is_set(TORCHRUN.world) {
            TORCHRUN
        } else if is_set(SLURM.world) && is_set("MASTER_ADDR") {
            SLURM
        } else {
            return Ok(None);
        };
        let get = |name: &'static str| {
            variable(name).ok_or(WorldError::Missing {
                given: names.world,
                missing: name,
            })
        };
        let count = |name: &'static str| {
            let found = get(name)?;
            found.trim().parse().map_err(|_| WorldError::NoNumber {
                name,
                expected: "a whole number",
                found,
            })
        };
        let or = |name: &'static str, default: usize| match is_set(name) {
            true => count(name),
            false => Ok(default),
        };

        let world = count(names.world)?;
        if world == 1 {
            return Ok(None);
        }
        let rank = count(names.rank)?;
        if rank >= world {
            return Err(WorldError::NoSuchRank { rank, world });
        }
        let port = get("MASTER_PORT")?;
        let port = port.trim().parse().map_err(|_| WorldError::NoNumber {
            name: "MASTER_PORT",
            expected: "a port, 1 to 65535",
            found: port.clone(),
        })?;
        let agent = variable("TORCHELASTIC_USE_AGENT_STORE");
        Ok(Some(Self {
            member: Member { rank, world },
            local_rank: or(names.local_rank, rank)?,
            local_world: or("LOCAL_WORLD_SIZE", 1)?.max(1),
            store: StoreAddress {
                host: get("MASTER_ADDR")?,
                port,
            },
            serves: rank == 0 && agent.as_deref() != Some("True"),
            restarts: or("TORCHELASTIC_RESTART_COUNT", 0)?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(variables: &str) -> Result<Option<World>, WorldError> {
        World::from(|name| {
            let pairs = variables
                .split_whitespace()
                .filter_map(|v| v.split_once('='));
            pairs
                .filter(|(key, _)| *key == name)
                .map(|(_, value)| value.to_owned())
                .next()
        })
    }

    #[test]
    fn launchers_are_understood() {
        let torchrun = "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node0 \
            MASTER_PORT=29500";
        let found = world(torchrun).unwrap().unwrap();
        let expected = World {
            member: Member { rank: 3, world: 4 },
            local_rank: 1,
            local_world: 2,
            store: StoreAddress {
                host: "node0".into(),
                port: 29500,
            },
            serves: false,
            restarts: 0,
        };
        assert_eq!(found, expected);

        let slurm = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 MASTER_ADDR=node0 MASTER_PORT=1";
        let found = world(slurm).unwrap().unwrap();
        assert_eq!(found.member, Member { rank: 0, world: 2 });
        assert!(found.serves);
        let both = format!("{slurm} {torchrun}");
        assert_eq!(world(&both).unwrap().unwrap().member.world, 4);
        let agent = torchrun.replace("RANK=3", "RANK=0") + " TORCHELASTIC_USE_AGENT_STORE=True";
        let agent = world(&format!("{agent} TORCHELASTIC_RESTART_COUNT=2"));
        let agent = agent.unwrap().unwrap();
        assert!(!agent.serves);
        assert_eq!(agent.restarts, 2);
    }

    #[test]
    fn who_is_alone_is_no_rank() {
        for alone in [
            "",
            "RANK=0 WORLD_SIZE=1",
            "SLURM_PROCID=0 SLURM_NTASKS=8",
            "MASTER_ADDR=a MASTER_PORT=1",
        ] {
            assert_eq!(world(alone), Ok(None), "{alone}");
        }
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for (variables, told) in [
            ("WORLD_SIZE=2", "RANK is not"),
            ("WORLD_SIZE=2 RANK=0", "MASTER_PORT is not"),
            ("WORLD_SIZE=2 RANK=0 MASTER_PORT=1", "MASTER_ADDR is not"),
            (
                "WORLD_SIZE=two RANK=0",
                "WORLD_SIZE must be a whole number, found \"two\"",
            ),
            ("WORLD_SIZE=2 RANK=2", "rank 2 is none of 2"),
            (
                "WORLD_SIZE=2 RANK=0 MASTER_ADDR=a MASTER_PORT=70000",
                "MASTER_PORT must be a port",
            ),
        ] {
            let error = world(variables).unwrap_err().to_string();
            assert!(error.contains(told), "{variables}: {error}");
        }
    }
}
