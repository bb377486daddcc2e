//! Limits of the machine, least work of a layer, and pairs of times.

use crate::Result;
use crate::here::{Here, Run};
use crate::peer::{Peer, Way};
use crate::select::Selection;
use crate::shapes::Shape;
use moesaic::DType;
use moesaic::cpu::{CpuDevice, host_isa, limits};
use moesaic::toolchain::{self, Registry};
use std::collections::BTreeSet;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// What one call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    /// Forward and backward.
    Both,
}

/// What the machine can do, measured now.
#[derive(Clone, Copy)]
pub struct Limits {
    pub gflops: f64,
    pub gbps: f64,
}

/// GFLOP/s of PyTorch's large product of this type, where there is PyTorch.
pub fn torch_product(dtype: DType, peers: &mut [Peer]) -> Option<f64> {
    let torch = peers.iter_mut().find(|peer| peer.name == "torch")?;
    let words = torch.ask(&format!("limit {dtype}")).ok()?;
    words.first()?.parse().ok()
}

impl Limits {
    /// # Errors
    /// When the probe does not compile or run.
    pub fn measure(here: &Here, dtype: DType) -> Result<Limits> {
        let registry = Registry::open().unwrap_or_else(|_| Registry::at(Path::new("")));
        let compiler = toolchain::c(&registry)?;
        let device = CpuDevice::with_threads(here.threads)?;
        let found = limits::measure(&compiler, &device, host_isa())?;
        let gflops = match dtype {
            DType::F32 => found.f32_gflops,
            _ => found.bf16_gflops.unwrap_or(0.0).max(found.f32_gflops),
        };
        Ok(Limits {
            gflops,
            gbps: found.read_gbps,
        })
    }

    /// Of what was measured before and after some work: the means.
    #[must_use]
    pub fn mean(self, after: Limits) -> Limits {
        Limits {
            gflops: (self.gflops + after.gflops) / 2.0,
            gbps: (self.gbps + after.gbps) / 2.0,
        }
    }

    /// The least seconds of the work: arithmetic or memory, whichever takes
    /// longer, each at its best.
    pub fn least(&self, work: &Work) -> f64 {
        (work.flops / self.gflops).max(work.bytes / self.gbps) / 1e9
    }
}

/// What a layer must do, whoever does it. Intermediate tensors are no part of it.
pub struct Work {
    /// Products of experts and router; a multiply-add counts two.
    pub flops: f64,
    /// Weights of experts that have tokens, tokens and outputs, each once a
    /// pass; in backward also the f32 gradients of all experts.
    pub bytes: f64,
}

impl Work {
    pub fn of(shape: &Shape, dtype: DType, tokens: usize, ids: &[i32], pass: Pass) -> Work {
        let matrices = if shape.gated() { 3 } else { 2 };
        let expert = matrices * shape.model_dim * shape.hidden_dim;
        let shared = matrices * shape.model_dim * shape.shared_dim;
        let router = shape.model_dim * shape.experts;
        let active = ids.iter().collect::<BTreeSet<_>>().len();
        let flops = 2 * tokens * (shape.top_k * expert + shared + router);
        let read = (active * expert + shared + router) * dtype.size();
        let rows = 2 * tokens * shape.model_dim * dtype.size();
        let gradients = 4 * (shape.experts * expert + shared + router);
        let (flops, bytes) = match pass {
            Pass::Forward => (flops, read + rows),
            Pass::Both => (3 * flops, 2 * (read + rows) + gradients),
        };
        Work {
            flops: flops as f64,
            bytes: bytes as f64,
        }
    }
}

/// Medians of one line.
pub struct Times {
    pub here: Duration,
    /// For each way their time over ours, the median over pairs.
    pub ratios: Vec<Option<f64>>,
}

/// A turn is at least this long, if that takes more than one call.
const TURN: Duration = Duration::from_millis(20);

/// Threads of the last turn spin for some time; nobody runs meanwhile.
const PAUSE: Duration = Duration::from_millis(15);

/// After so long one pair is enough.
const LONG: Duration = Duration::from_secs(15);

const LEAST: usize = 3;
const MOST: usize = 25;

/// Times ours beside each way in `equal`, in turns.
///
/// # Errors
/// When our layer fails.
pub fn pairs(
    run: &Run<'_>,
    peers: &mut [Peer],
    ways: &[Way],
    equal: &[bool],
    selection: &Selection,
) -> Result<Times> {
    let mut here = Vec::new();
    let mut ratios = vec![Vec::new(); ways.len()];
    let mut lost: Vec<bool> = equal.iter().map(|equal| !equal).collect();
    let counts = counts(run, peers, ways, &mut lost, selection.pass)?;
    let mut spent = vec![Duration::ZERO; ways.len()];
    for round in 0..MOST {
        let enough = |spent: Duration| match round {
            0 => false,
            _ if round < LEAST => spent > LONG,
            _ => spent > selection.budget,
        };
        let open = |i: &usize| !lost[*i] && !enough(spent[*i]);
        let open: Vec<usize> = (0..ways.len()).filter(open).collect();
        if open.is_empty() && round >= LEAST {
            break;
        }
        if open.is_empty() {
            here.push(turn(run, counts.0)?);
        }
        for i in open {
            let began = Instant::now();
            let ours = turn(run, counts.0)?;
            here.push(ours);
            sleep(PAUSE);
            let peer = &mut peers[ways[i].peer];
            if let Ok(times) = peer.run(&ways[i], selection.pass, counts.1[i]) {
                ratios[i].push(settled(times).as_secs_f64() / ours.as_secs_f64());
            }
            spent[i] += began.elapsed();
        }
    }
    Ok(Times {
        here: median(here),
        ratios: ratios.into_iter().map(middle).collect(),
    })
}

/// Calls a turn, ours and everyone's; who fails here is lost.
fn counts(
    run: &Run<'_>,
    peers: &mut [Peer],
    ways: &[Way],
    lost: &mut [bool],
    pass: Pass,
) -> Result<(usize, Vec<usize>)> {
    run.once()?;
    let ours = calls(run.once()?);
    let mut theirs = vec![0; ways.len()];
    for (i, way) in ways.iter().enumerate() {
        if lost[i] {
            continue;
        }
        match peers[way.peer].run(way, pass, 1) {
            Ok(times) => theirs[i] = calls(times[0]),
            Err(problem) => {
                println!("# {} is left out: {problem}", way.title);
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
