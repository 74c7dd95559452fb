//! How ranks learn that one of them is gone: each gives signs of life in the store, from a thread of its
//! own that no operation keeps.
//!
//! Rank 0 looks at all others and writes down what it finds; the others look for that, and at rank 0. A
//! rank is lost when its sign has not changed for a while, which no clock of another machine tells.
//! When rank 0 ends, the store that it serves ends with it, and that too is a sign.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use flamia_autograd::distributed::{DistributedError, Member, Store};

use super::TeamError;

/// The key under which rank 0 writes down why all are to end.
const VERDICT: &str = "verdict";

/// Why the job ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Who tells it.
    pub told_by: usize,
    /// The rank that is at fault.
    pub rank: usize,
    /// What is known of it.
    pub what: String,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            told_by,
            rank,
            what,
        } = self;
        write!(
            f,
            "rank {rank} {what}; rank {told_by} ends with it. --resume goes on from the last whole \
             checkpoint, with any number of ranks"
        )
    }
}

/// A rank's signs of life, and its watch over the others.
#[derive(Debug)]
pub struct Heart {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    beat: Duration,
}

#[derive(Debug)]
struct Shared {
    life: Mutex<Life>,
    changed: Condvar,
}

/// What a rank says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Life {
    /// It does this.
    Alive(String),
    /// It failed, with these words.
    Failed(String),
    /// It is done.
    Left,
}

impl Shared {
    fn life(&self) -> MutexGuard<'_, Life> {
        // A panic elsewhere leaves nothing half done here.
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heart {
    /// Starts to give and look for signs of life on `store`, a connection of its own.
    ///
    /// When a rank fails, or gives no sign for `lost_after`, `on_verdict` is called once, on the heart's thread.
    ///
    /// # Errors
    /// [`TeamError`] when the first sign cannot be given.
    pub fn start(
        store: Store,
        member: Member,
        lost_after: Duration,
        on_verdict: impl FnOnce(&Verdict) + Send + 'static,
    ) -> Result<Self, TeamError> {
        let beat = (lost_after / 10).clamp(Duration::from_millis(20), Duration::from_secs(2));
        let shared = Arc::new(Shared {
            life: Mutex::new(Life::Alive("starting".into())),
            changed: Condvar::new(),
        });
        let mut watch = Watch {
            store,
            member,
            beat,
            lost_after,
            beats: 0,
            seen: BTreeMap::new(),
        };
        watch.tell(&Life::Alive("starting".into()))?;
        let theirs = shared.clone();
        let thread = thread::Builder::new()
            .name("heart".into())
            .spawn(move || watch.run(&theirs, on_verdict))
            .map_err(TeamError::Thread)?;
        Ok(Self {
            shared,
            thread: Some(thread),
            beat,
        })
    }

    /// Says what this rank does from here on, for others to tell if it is lost.
    pub fn doing(&self, what: &str) {
        *self.shared.life() = Life::Alive(what.into());
    }

    /// Says that this rank ends with an error, which ends the others; returns when they can know.
    pub fn fail(mut self, why: &str) {
        self.end(Life::Failed(why.into()));
    }

    /// Says that this rank is done.
    pub fn leave(mut self) {
        self.end(Life::Left);
    }

    /// Waits for a verdict, for as long as one may take to come: then `on_verdict` has been called, if
    /// there is one.
    pub fn wait_for_verdict(&self, lost_after: Duration) {
        let deadline = Instant::now() + lost_after + 6 * self.beat;
        while Instant::now() < deadline && !self.thread.as_ref().is_none_or(JoinHandle::is_finished)
        {
            thread::sleep(self.beat / 4);
        }
    }

    fn end(&mut self, life: Life) {
        if let Some(thread) = self.thread.take() {
            *self.shared.life() = life;
            self.shared.changed.notify_all();
            // A panic of the heart's has been printed.
            let _ = thread.join();
        }
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.end(Life::Failed("ended without a word".into()));
    }
}

/// The heart's thread.
struct Watch {
    store: Store,
    member: Member,
    beat: Duration,
    lost_after: Duration,
    beats: u64,
    /// The others' last signs, and when they changed.
    seen: BTreeMap<usize, (String, Instant)>,
}

impl Watch {
    fn run(mut self, shared: &Shared, on_verdict: impl FnOnce(&Verdict)) {
        loop {
            let life = shared.life().clone();
            let looked = self.tell(&life).and_then(|()| self.look());
            match (looked, life) {
                (Ok(None), Life::Alive(_)) => {}
                // Rank 0's failure is for it to write down; it serves the store until others can have read it.
                (_, Life::Failed(why)) => {
                    if self.member.rank == 0 {
                        let _ = self.write_down(0, &format!("failed: {why}"));
                    }
                    break;
                }
                (_, Life::Left) => break,
                (Ok(Some(verdict)), _) => return on_verdict(&verdict),
                (Err(error), _) => {
                    return on_verdict(&Verdict {
                        told_by: self.member.rank,
                        rank: 0,
                        what: format!("is lost, as its store does not answer: {error}"),
                    });
                }
            }
            self.sleep(shared);
        }
    }

    /// Until the next beat, or until the rank ends.
    fn sleep(&self, shared: &Shared) {
        let is_alive = |life: &mut Life| matches!(life, Life::Alive(_));
        let life = shared.life();
        drop(shared.changed.wait_timeout_while(life, self.beat, is_alive));
    }

    fn tell(&mut self, life: &Life) -> Result<(), DistributedError> {
        self.beats += 1;
        let (state, words) = match life {
            Life::Alive(doing) => ("alive", doing.as_str()),
            Life::Failed(why) => ("failed", why.as_str()),
            Life::Left => ("left", ""),
        };
        let sign = format!("{} {state} {words}", self.beats);
        self.store.set(&key(self.member.rank), sign.as_bytes())
    }

    fn look(&mut self) -> Result<Option<Verdict>, DistributedError> {
        let Member { rank, world } = self.member;
        if rank != 0 {
            if self.store.has(VERDICT)? {
                let text = self.text(VERDICT)?;
                let (at_fault, what) = text.split_once(' ').unwrap_or(("0", "failed"));
                return Ok(Some(self.verdict(at_fault.parse().unwrap_or(0), what)));
            }
            return Ok(self.look_at(0)?.map(|what| self.verdict(0, &what)));
        }
        for other in 1..world {
            if let Some(what) = self.look_at(other)? {
                self.write_down(other, &what)?;
                return Ok(Some(self.verdict(other, &what)));
            }
        }
        Ok(None)
    }

    /// What is wrong with the rank `other`.
    fn look_at(&mut self, other: usize) -> Result<Option<String>, DistributedError> {
        let sign = match self.store.has(&key(other))? {
            true => self.text(&key(other))?,
            // It is waited for elsewhere.
            false => return Ok(None),
        };
        let mut words = sign.splitn(3, ' ').skip(1);
        let (state, words) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        match state {
            "left" => return Ok(None),
            "failed" => return Ok(Some(format!("failed: {words}"))),
            _ => {}
        }
        let now = Instant::now();
        match self.seen.get(&other) {
            Some((before, since)) if *before == sign => {
                let silent = since.elapsed();
                let lost = silent >= self.lost_after;
                Ok(lost.then(|| {
                    let seconds = silent.as_secs_f64();
                    format!("is lost: no sign of life for {seconds:.1} s, the last from {words}")
                }))
            }
            _ => {
                self.seen.insert(other, (sign.clone(), now));
                Ok(None)
            }
        }
    }

    /// Tells all others, and gives them time to read it while the store is there.
    fn write_down(&self, at_fault: usize, what: &str) -> Result<(), DistributedError> {
        self.store
            .set(VERDICT, format!("{at_fault} {what}").as_bytes())?;
        thread::sleep(3 * self.beat);
        Ok(())
    }

    fn verdict(&self, rank: usize, what: &str) -> Verdict {
        Verdict {
            told_by: self.member.rank,
            rank,
            what: what.into(),
        }
    }

    fn text(&self, key: &str) -> Result<String, DistributedError> {
        let value = self.store.get(key, self.lost_after)?;
        Ok(String::from_utf8_lossy(&value).into_owned())
    }
}

fn key(rank: usize) -> String {
    format!("heart/{rank}")
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::{Receiver, channel};

    use flamia_autograd::distributed::StoreAddress;

    use super::*;

    /// Longer than a busy machine keeps a thread waiting.
    const LOST_AFTER: Duration = Duration::from_secs(2);
    const PATIENCE: Duration = Duration::from_secs(20);

    struct Ranks {
        hearts: Vec<Option<Heart>>,
        verdicts: Vec<Receiver<Verdict>>,
        _server: Store,
    }

    /// Three ranks, of which `silent` gives its first sign and no other.
    fn three(silent: Option<usize>) -> Ranks {
        let port = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = StoreAddress {
            host: "127.0.0.1".into(),
            port: port.local_addr().unwrap().port(),
        };
        drop(port);
        let server = Store::open(address.clone(), 0, true, PATIENCE).unwrap();
        let (mut hearts, mut verdicts) = (Vec::new(), Vec::new());
        for rank in 0..3 {
            let store = Store::open(address.clone(), rank, false, PATIENCE).unwrap();
            let (sender, receiver) = channel();
            verdicts.push(receiver);
            if silent == Some(rank) {
                store.set(&key(rank), b"1 alive step 7").unwrap();
                hearts.push(None);
                continue;
            }
            let heart = Heart::start(
                store,
                Member { rank, world: 3 },
                LOST_AFTER,
                move |verdict| {
                    sender.send(verdict.clone()).unwrap();
                },
            );
            hearts.push(Some(heart.unwrap()));
        }
        Ranks {
            hearts,
            verdicts,
            _server: server,
        }
    }

    #[test]
    fn a_silent_rank_is_named_to_all_with_what_it_did() {
        for silent in [0, 2] {
            let start = Instant::now();
            let ranks = three(Some(silent));
            for rank in (0..3).filter(|&rank| rank != silent) {
                // Nobody sees rank 2 but rank 0, and nobody tells that rank 0 is silent but each by itself.
                let verdict = ranks.verdicts[rank].recv_timeout(PATIENCE).unwrap();
                assert_eq!((verdict.rank, verdict.told_by), (silent, rank));
                let told = verdict.to_string();
                assert!(told.contains("no sign of life"), "{told}");
                assert!(told.contains("the last from step 7"), "{told}");
            }
            assert!(start.elapsed() >= LOST_AFTER, "{:?}", start.elapsed());
        }
    }

    #[test]
    fn a_rank_that_fails_ends_the_others_at_once_with_its_words() {
        for failing in 0..3 {
            let mut ranks = three(None);
            let start = Instant::now();
            ranks.hearts[failing]
                .take()
                .unwrap()
                .fail("the disk is full");
            for rank in (0..3).filter(|&rank| rank != failing) {
                let verdict = ranks.verdicts[rank].recv_timeout(PATIENCE).unwrap();
                assert_eq!(verdict.rank, failing);
                assert_eq!(verdict.what, "failed: the disk is full");
            }
            assert!(start.elapsed() < LOST_AFTER, "{:?}", start.elapsed());
        }
    }

    #[test]
    fn ranks_that_leave_in_any_order_are_no_loss() {
        let mut ranks = three(None);
        ranks.hearts[1].take().unwrap().leave();
        ranks.hearts[2].as_ref().unwrap().doing("step 1");
        thread::sleep(LOST_AFTER + LOST_AFTER / 4);
        ranks.hearts[0].take().unwrap().leave();
        thread::sleep(LOST_AFTER + LOST_AFTER / 4);
        ranks.hearts[2].take().unwrap().leave();
        for verdict in &ranks.verdicts {
            assert!(verdict.try_recv().is_err());
        }
    }
}
