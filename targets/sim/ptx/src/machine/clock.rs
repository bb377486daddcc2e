//! Vector clocks: the events that a thread knows to have happened before.
//!
//! Time is one counter for the machine, which advances whenever a thread
//! releases its writes. An access is stamped with its thread and the time. A
//! thread knows the access if its clock holds at least that time for that
//! thread; then synchronisation orders the two (causality order of the PTX ISA,
//! "Memory Consistency Model").
//!
//! Copies and products complete in order per counter: the phases of an
//! mbarrier, the products of a warpgroup, the bulk groups of a thread. Each
//! such counter is a further component of the clock.

use std::rc::Rc;

/// The events that one thread, or one barrier, knows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Clock {
    /// Per warp: the time up to which all events of its threads are known.
    warps: Vec<u32>,
    /// Per thread, sorted: times beyond those of its warp.
    threads: Vec<(u32, u32)>,
    /// Per component of the copies and products: the last known step.
    engines: Vec<u32>,
    /// The smallest of `warps`: every event up to it is known.
    floor: u32,
}

impl Clock {
    /// Returns a clock that knows every event up to `time`.
    pub fn start(warps: usize, time: u32) -> Clock {
        Clock {
            warps: vec![time; warps],
            threads: Vec::new(),
            engines: Vec::new(),
            floor: time,
        }
    }

    /// Returns the time up to which every event is known.
    #[inline(always)]
    pub fn floor(&self) -> u32 {
        self.floor
    }

    /// Returns true if the event of `thread` at `time` is known.
    #[inline]
    pub fn knows(&self, thread: u32, time: u32) -> bool {
        if time <= self.floor || time <= self.warps[thread as usize / 32] {
            return true;
        }
        let at = self.threads.binary_search_by_key(&thread, |entry| entry.0);
        at.is_ok_and(|at| time <= self.threads[at].1)
    }

    /// Returns true if step `number` of a component is known to be over.
    #[inline]
    pub fn knows_engine(&self, component: u32, number: u32) -> bool {
        let own = self.engines.get(component as usize);
        own.is_some_and(|own| *own >= number)
    }

    /// Adds the steps of a component up to `number`.
    pub fn add_engine(&mut self, component: u32, number: u32) {
        let at = component as usize;
        if self.engines.len() <= at {
            self.engines.resize(at + 1, 0);
        }
        self.engines[at] = self.engines[at].max(number);
    }

    /// Adds all events of a warp's threads up to `time`.
    pub fn add_warp(&mut self, warp: u32, time: u32) {
        let own = &mut self.warps[warp as usize];
        *own = (*own).max(time);
        self.settle();
    }

    /// Adds all events of one thread up to `time`.
    pub fn add_thread(&mut self, thread: u32, time: u32) {
        match self.threads.binary_search_by_key(&thread, |entry| entry.0) {
            Ok(at) => self.threads[at].1 = self.threads[at].1.max(time),
            Err(at) => self.threads.insert(at, (thread, time)),
        }
    }

    /// Adds everything that `other` knows.
    pub fn join(&mut self, other: &Clock) {
        for (own, other) in self.warps.iter_mut().zip(&other.warps) {
            *own = (*own).max(*other);
        }
        for &(thread, time) in &other.threads {
            self.add_thread(thread, time);
        }
        for (component, number) in other.engines.iter().enumerate() {
            if *number > 0 {
                self.add_engine(component as u32, *number);
            }
        }
        self.settle();
    }

    /// Drops entries that the warps cover; 32 threads of a warp become the
    /// warp.
    fn settle(&mut self) {
        let warps = &mut self.warps;
        let mut at = 0;
        // Without this step a clock grows by one entry per thread at every
        // mbarrier arrival, and joins become quadratic in the threads of a
        // block.
        while at + 32 <= self.threads.len() {
            let run = &self.threads[at..at + 32];
            let whole = run[0].0.is_multiple_of(32) && run[31].0 == run[0].0 + 31;
            if whole {
                // The warp gets the oldest of the 32 times; threads beyond it
                // keep entries of their own, because the warp's time must hold
                // for all lanes.
                let least = run.iter().map(|entry| entry.1).min().unwrap_or(0);
                let warp = &mut warps[run[0].0 as usize / 32];
                *warp = (*warp).max(least);
                at += 32;
            } else {
                at += 1;
            }
        }
        self.threads
            .retain(|(thread, time)| *time > warps[*thread as usize / 32]);
        self.floor = warps.iter().copied().min().unwrap_or(0);
    }
}

/// A thread's knowledge: of ordinary accesses, and of the accesses that TMA and
/// tensor cores see because a proxy fence came after them.
#[derive(Clone, Debug, Default)]
pub struct Known {
    // Two clocks are needed because the async proxy does not see what the
    // generic proxy wrote, however well the two are ordered, until a
    // `fence.proxy.async` follows the write (PTX ISA, "Proxies").
    pub seen: Rc<Clock>,
    pub fenced: Rc<Clock>,
}

impl Known {
    pub fn start(warps: usize, time: u32) -> Known {
        let clock = Rc::new(Clock::start(warps, time));
        Known {
            seen: Rc::clone(&clock),
            fenced: clock,
        }
    }

    /// Adds the knowledge of another thread.
    pub fn join(&mut self, other: &Known) {
        join(&mut self.seen, &other.seen);
        join(&mut self.fenced, &other.fenced);
    }

    /// Copies all that is known to the fenced clock, as `fence.proxy.async`
    /// does.
    pub fn fence(&mut self, thread: u32, time: u32) {
        // The thread's own writes count too, though `seen` does not record
        // them: a thread always knows its own past.
        let mut clock = Clock::clone(&self.seen);
        clock.add_thread(thread, time);
        clock.join(&self.fenced);
        self.fenced = Rc::new(clock);
    }
}

fn join(own: &mut Rc<Clock>, other: &Rc<Clock>) {
    // Threads that met at the same barrier share one clock behind one pointer.
    // The comparison of pointers is what keeps full checks affordable.
    if !Rc::ptr_eq(own, other) && own != other {
        Rc::make_mut(own).join(other);
    }
}

/// The knowledge that several threads put together for those that wait.
#[derive(Clone, Debug, Default)]
pub struct Gathered(Option<Known>);

impl Gathered {
    /// Adds the knowledge and the events of the lanes of a warp.
    pub fn add(&mut self, known: &[Known], warp: u32, lanes: u32, whole: bool, time: u32) {
        let first = lanes.trailing_zeros() as usize;
        let mut last = &known[first];
        let own = self.0.get_or_insert_with(|| last.clone());
        own.join(last);
        for lane in (first + 1..32).filter(|lane| lanes >> lane & 1 == 1) {
            let next = &known[lane];
            // Lanes that came from the same barrier share a clock, so joining
            // it once per run of equal lanes is enough.
            let same = Rc::ptr_eq(&next.seen, &last.seen) && Rc::ptr_eq(&next.fenced, &last.fenced);
            if !same {
                own.join(next);
            }
            last = next;
        }
        let clock = Rc::make_mut(&mut own.seen);
        if whole {
            clock.add_warp(warp, time);
        } else {
            for lane in (0..32).filter(|lane| lanes >> lane & 1 == 1) {
                clock.add_thread(warp * 32 + lane, time);
            }
        }
    }

    /// Returns the gathered knowledge, if there is any.
    pub fn known(&self) -> Option<&Known> {
        self.0.as_ref()
    }

    /// Takes the gathered knowledge.
    pub fn take(&mut self) -> Option<Known> {
        self.0.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_whole_warp_become_the_warp() {
        let mut clock = Clock::start(2, 10);
        for thread in 32..63 {
            clock.add_thread(thread, 20);
        }
        clock.join(&Clock::start(2, 0));
        assert!(clock.knows(40, 20) && !clock.knows(63, 20) && clock.knows(63, 10));
        clock.add_thread(63, 15);
        clock.join(&Clock::start(2, 0));
        assert!(clock.knows(63, 15) && !clock.knows(63, 16));
        assert!(clock.knows(40, 20), "threads beyond their warp stay");
        assert_eq!(clock.floor(), 10);
        clock.add_warp(0, 15);
        assert_eq!(clock.floor(), 15);
    }

    #[test]
    fn fences_cover_what_was_known() {
        let mut known = Known::start(1, 0);
        Rc::make_mut(&mut known.seen).add_thread(3, 7);
        assert!(known.seen.knows(3, 7) && !known.fenced.knows(3, 7));
        known.fence(5, 8);
        assert!(known.fenced.knows(3, 7) && known.fenced.knows(5, 8));
        assert!(!known.fenced.knows(5, 9));
    }

    #[test]
    fn engine_steps_travel_with_joins() {
        let mut a = Clock::start(1, 0);
        a.add_engine(2, 5);
        let mut b = Clock::start(1, 0);
        b.join(&a);
        assert!(b.knows_engine(2, 5) && !b.knows_engine(2, 6) && !b.knows_engine(1, 1));
    }
}
