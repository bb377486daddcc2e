//! The roofline of a layer, and pairs of times.

use crate::Result;
use crate::gauge::{Gauge, Limits};
use crate::here::Run;
use crate::pass::Pass;
use crate::peer::{Peer, Variant};
use crate::select::Selection;
use crate::work::Work;
use moesaic::DType;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// GFLOP/s of PyTorch's large product of this type, where there is PyTorch.
pub fn torch_product(dtype: DType, peers: &mut [Peer]) -> Option<f64> {
    let torch = peers.iter_mut().find(|peer| peer.name == "torch")?;
    let words = torch.ask(&format!("limit {dtype}")).ok()?;
    words.first()?.parse().ok()
}

/// Medians of one line.
pub struct Times {
    pub here: Duration,
    /// Rates of the machine at the same time.
    pub limits: Limits,
    /// The roofline of the work over our time: the median over pairs of a turn and the limits
    /// that the machine had before and after it.
    pub of_roofline: f64,
    /// For each variant their time over ours, the median over pairs.
    pub ratios: Vec<Option<f64>>,
}

/// Our turns and the machine's: limits of round `i` were measured before it, and one
/// more after the last.
#[derive(Default)]
struct Held {
    turns: Vec<(usize, Duration)>,
    limits: Vec<Limits>,
}

impl Held {
    fn turn(&mut self, time: Duration) {
        self.turns.push((self.limits.len() - 1, time));
    }

    fn of_roofline(&self, work: &Work) -> f64 {
        let shares = self.turns.iter().map(|&(round, time)| {
            let limits = self.limits[round].mean(self.limits[round + 1]);
            limits.roofline(work) / time.as_secs_f64()
        });
        middle(shares.collect()).unwrap_or(f64::NAN)
    }

    fn times(&self, work: &Work, ratios: Vec<Vec<f64>>) -> Times {
        let of = |f: fn(&Limits) -> f64| middle(self.limits.iter().map(f).collect());
        Times {
            here: median(self.turns.iter().map(|turn| turn.1).collect()),
            limits: Limits {
                gflops: of(|limits| limits.gflops).unwrap_or(f64::NAN),
                gbps: of(|limits| limits.gbps).unwrap_or(f64::NAN),
            },
            of_roofline: self.of_roofline(work),
            ratios: ratios.into_iter().map(middle).collect(),
        }
    }
}

/// A turn is at least this long, if that takes more than one call.
const TURN: Duration = Duration::from_millis(20);

/// Threads of the last turn spin for some time; nobody runs meanwhile.
const PAUSE: Duration = Duration::from_millis(15);

/// After so long one pair is enough.
const LONG: Duration = Duration::from_secs(15);

const LEAST: usize = 3;
const MOST: usize = 25;

/// Times ours in turns with each variant in `equal` and with the rates of the
/// machine.
///
/// # Errors
/// When our layer or a probe fails.
pub fn pairs(
    run: &Run<'_>,
    work: &Work,
    gauge: &Gauge,
    peers: &mut [Peer],
    variants: &[Variant],
    equal: &[bool],
    selection: &Selection,
) -> Result<Times> {
    let mut held = Held::default();
    let mut ratios = vec![Vec::new(); variants.len()];
    let mut lost: Vec<bool> = equal.iter().map(|equal| !equal).collect();
    let counts = counts(run, peers, variants, &mut lost, selection.pass)?;
    let mut spent = vec![Duration::ZERO; variants.len()];
    let begun = Instant::now();
    for round in 0..MOST {
        let enough = |spent: Duration| match round {
            0 => false,
            _ if round < LEAST => spent > LONG,
            _ => spent > selection.budget,
        };
        let open = |i: &usize| !lost[*i] && !enough(spent[*i]);
        let open: Vec<usize> = (0..variants.len()).filter(open).collect();
        if open.is_empty() && round >= LEAST && begun.elapsed() > selection.budget {
            break;
        }
        sleep(PAUSE);
        held.limits.push(gauge.measure()?);
        if open.is_empty() {
            held.turn(turn(run, counts.0)?);
        }
        for i in open {
            let began = Instant::now();
            let ours = turn(run, counts.0)?;
            held.turn(ours);
            sleep(PAUSE);
            let peer = &mut peers[variants[i].peer];
            if let Ok(times) = peer.run(&variants[i], selection.pass, counts.1[i]) {
                ratios[i].push(settled(times).as_secs_f64() / ours.as_secs_f64());
            }
            spent[i] += began.elapsed();
        }
    }
    sleep(PAUSE);
    held.limits.push(gauge.measure()?);
    Ok(held.times(work, ratios))
}

/// Calls a turn, ours and everyone's; who fails here is lost.
fn counts(
    run: &Run<'_>,
    peers: &mut [Peer],
    variants: &[Variant],
    lost: &mut [bool],
    pass: Pass,
) -> Result<(usize, Vec<usize>)> {
    run.once()?;
    let ours = calls(run.once()?);
    let mut theirs = vec![0; variants.len()];
    for (i, variant) in variants.iter().enumerate() {
        if lost[i] {
            continue;
        }
        match peers[variant.peer].run(variant, pass, 1) {
            Ok(times) => theirs[i] = calls(times[0]),
            Err(problem) => {
                println!("# {} is left out: {problem}", variant.title);
                lost[i] = true;
            }
        }
    }
    Ok((ours, theirs))
}

/// Calls that fill a turn, and one that does not count.
fn calls(one: Duration) -> usize {
    match TURN.as_nanos() / one.as_nanos().max(1) {
        0 => 1,
        more => more.min(2000) as usize + 1,
    }
}

fn turn(run: &Run<'_>, count: usize) -> Result<Duration> {
    sleep(PAUSE);
    let times: Result<Vec<Duration>> = (0..count).map(|_| run.once()).collect();
    Ok(settled(times?))
}

/// The median, without the first where there are others.
fn settled(mut times: Vec<Duration>) -> Duration {
    if times.len() > 1 {
        times.remove(0);
    }
    median(times)
}

/// The middle one, the later of two.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Likewise; `None` of none.
pub fn middle(mut ratios: Vec<f64>) -> Option<f64> {
    ratios.sort_unstable_by(f64::total_cmp);
    ratios.get(ratios.len() / 2).copied()
}
