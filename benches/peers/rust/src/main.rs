//! MoE layers out of the `gemm` crate and out of candle, as peers of
//! `cargo bench -p moesaic-benches --bench layer`. `../README.md` has the protocol.

mod candle_block;
mod gemm_loop;
mod layer;

use candle_block::CandleBlock;
use gemm_loop::GemmLoop;
use layer::{Files, Layer};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::error::Error;
use std::io::BufRead;
use std::path::Path;
use std::time::Instant;

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// One layer with an input in place.
trait Block {
    /// The ways to run it.
    fn ways(&self) -> &'static [&'static str];
    /// Takes `x [T, d]`.
    fn input(&mut self, x: &TensorView<'_>) -> Result;
    /// Runs it; the result stays inside.
    fn run(&mut self, way: &str) -> Result;
    /// The last result `[T, d]` in f32.
    fn y(&self) -> Result<Vec<f32>>;
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, _, threads] = &args[..] else {
        return println!("no arguments: gemm|candle --threads N");
    };
    let threads = threads.parse().unwrap_or(1);
    // This thread waits for the pool, so that it does not count.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    if let Err(error) = pool.build_global() {
        return println!("no {error}");
    }
    match kind.as_str() {
        "gemm" => println!("ready gemm 0.19 for x86-64-v4"),
        _ => println!("ready candle 0.11"),
    }
    let mut block: Option<Box<dyn Block>> = None;
    for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
        let words: Vec<&str> = line.split(' ').collect();
        match obey(kind, threads, &mut block, &words) {
            Ok(words) => println!("ok {words}"),
            Err(error) => println!("no {error}"),
        }
    }
}

fn obey(
    kind: &str,
    threads: usize,
    block: &mut Option<Box<dyn Block>>,
    words: &[&str],
) -> Result<String> {
    match words {
        ["load", folder] => {
            *block = None;
            let made = load(kind, threads, Path::new(folder))?;
            let ways = made.ways().iter().map(|way| format!("{way}:forward"));
            let ways: Vec<String> = ways.collect();
            *block = Some(made);
            Ok(ways.join(" "))
        }
        ["input", path] => {
            let bytes = std::fs::read(path)?;
            let file = SafeTensors::deserialize(&bytes)?;
            loaded(block)?.input(&file.tensor("x")?)?;
            Ok(String::new())
        }
        ["check", way, "forward", path] => {
            let block = loaded(block)?;
            block.run(way)?;
            write(&block.y()?, Path::new(path))?;
            Ok(String::new())
        }
        ["run", way, "forward", count] => times(loaded(block)?, way, count.parse()?),
        _ => Err("unknown command".into()),
    }
}

fn loaded(block: &mut Option<Box<dyn Block>>) -> Result<&mut Box<dyn Block>> {
    block.as_mut().ok_or_else(|| "nothing is loaded".into())
}

fn load(kind: &str, threads: usize, folder: &Path) -> Result<Box<dyn Block>> {
    let layer = Layer::read(folder)?;
    let bytes = std::fs::read(folder.join("weights.safetensors"))?;
    let files = Files::new(&bytes)?;
    Ok(match kind {
        "gemm" => Box::new(GemmLoop::new(layer, &files, threads)?),
        _ => Box::new(CandleBlock::new(layer, &files)?),
    })
}

/// Nanoseconds of each call.
fn times(block: &mut Box<dyn Block>, way: &str, count: usize) -> Result<String> {
    let mut times = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        block.run(way)?;
        times.push(start.elapsed().as_nanos().to_string());
    }
    Ok(times.join(" "))
}

/// Writes `y`; the bench knows how long a row is.
fn write(y: &[f32], path: &Path) -> Result {
    let bytes: Vec<u8> = y.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![1, y.len()], &bytes)?;
    safetensors::serialize_to_file([("y", view)], None, path)?;
    Ok(())
}
