//! The GEMMs of experts, each compared with the peak of the machine's
//! arithmetic, in turns: the peak, all GEMMs, the peak, all GEMMs.

use crate::data::{self, Call};
use crate::gauge::Gauge;
use crate::here::Here;
use crate::select::Selection;
use crate::shapes::Shape;
use crate::timing::{median, middle};
use crate::{Result, SEED, table};
use moesaic::DType;
use moesaic::engine::StepTime;
use moesaic::reference::Skew;
use std::time::{Duration, Instant};

pub const LEGEND: &str = "\
# of peak: arithmetic that a product needs over its time, over what multiply-adds alone reach in 100 ms before and 100 ms after
# the pass that it is part of (column `peak`), a sustained rate, not the peak of a moment; median over passes.
";

/// Time for the peak between two passes.
const PEAK: Duration = Duration::from_millis(100);

/// Passes of a line, at least.
const LEAST: usize = 5;

/// Prints one table: a layer in one type on a number of threads.
///
/// # Errors
/// When the layer or the probe fails.
pub fn report(selection: &Selection, threads: usize, dtype: DType, shape: &Shape) -> Result {
    let spec = shape.spec(dtype);
    let weights = data::weights(&spec, dtype);
    let here = Here::new(&spec, &weights, threads, selection.pass)?;
    let router = data::router_rows(&weights);
    drop(weights);
    table::head(shape, dtype, threads, None);
    let gauge = Gauge::new(threads, dtype)?;
    for &skew in &selection.skews {
        for &tokens in &selection.tokens {
            let ids = skew.draw(shape.experts, shape.top_k, tokens, SEED);
            let call = Call::new(shape, dtype, tokens, &ids, &router);
            here.check_routing(&call, &ids)?;
            here.stage(&call)?;
            head(skew, tokens, shape);
            passes(&here, tokens, &gauge, selection.budget)?.print();
        }
    }
    Ok(())
}

fn head(skew: Skew, tokens: usize, shape: &Shape) {
    let rows = (tokens * shape.top_k) as f64 / shape.experts as f64;
    println!("{tokens} tokens, {skew}: {rows:.1} rows an expert on average");
    println!("product                           ms   GFLOP/s      peak  of peak");
}

/// One product in all passes, or all products.
struct Line {
    name: String,
    passes: Vec<Pass>,
}

/// A time, and GFLOP/s: of the product, of the peak.
struct Pass {
    time: Duration,
    rate: f64,
    peak: f64,
}

/// The products, then all of them together.
#[derive(Default)]
struct Lines(Vec<Line>);

fn passes(here: &Here, tokens: usize, gauge: &Gauge, budget: Duration) -> Result<Lines> {
    let work = here.products(tokens);
    let mut lines = Lines::default();
    let begun = Instant::now();
    let mut before = gauge.arithmetic(PEAK)?;
    for pass in 0.. {
        if pass >= LEAST && begun.elapsed() > budget {
            break;
        }
        let times = here.time_steps(tokens)?;
        let after = gauge.arithmetic(PEAK)?;
        lines.add(&times, &work, (before + after) / 2.0);
        before = after;
    }
    Ok(lines)
}

impl Lines {
    /// `work`: floating point operations of each step, none where it is no
    /// product of experts.
    fn add(&mut self, times: &[StepTime], work: &[Option<f64>], peak: f64) {
        let (mut time, mut flops) = (Duration::ZERO, 0.0);
        for (step, work) in times.iter().zip(work) {
            let Some(work) = work else { continue };
            self.pass(&step.symbol, step.time, *work, peak);
            time += step.time;
            flops += work;
        }
        self.pass("together", time, flops, peak);
    }

    fn pass(&mut self, name: &str, time: Duration, flops: f64, peak: f64) {
        let rate = flops / time.as_secs_f64() / 1e9;
        let pass = Pass { time, rate, peak };
        match self.0.iter_mut().find(|line| line.name == name) {
            Some(line) => line.passes.push(pass),
            None => self.0.push(Line {
                name: name.to_string(),
                passes: vec![pass],
            }),
        }
    }

    fn print(&self) {
        for Line { name, passes } in &self.0 {
            let of =
                |f: fn(&Pass) -> f64| middle(passes.iter().map(f).collect()).unwrap_or(f64::NAN);
            let time = median(passes.iter().map(|pass| pass.time).collect());
            println!(
                "{name:26} {:9.3} {:9.1} {:9.1} {:6.1} %",
                time.as_secs_f64() * 1e3,
                of(|pass| pass.rate),
                of(|pass| pass.peak),
                of(|pass| 100.0 * pass.rate / pass.peak),
            );
        }
    }
}
