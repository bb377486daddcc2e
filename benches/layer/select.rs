//! The options of a run of the bench.

use crate::Result;
use crate::pass::Pass;
use crate::shapes::{SHAPES, Shape};
use moesaic::DType;
use moesaic::reference::Skew;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

/// The options.
pub const HELP: &str = "\
cargo bench -p moesaic-benches --bench layer -- [OPTIONS]

  --shape NAME,…    qwen3, mixtral, deepseek-v3, gpt-oss, olmoe, olmoe-half,
                    tutel; all                                            [qwen3,tutel]
  --tokens N,…                                                         [1,8,64,512,4096]
  --dtype NAME,…    f32, bf16                                                 [f32,bf16]
  --threads N,…                                                          [one per core]
  --skew NAME,…     uniform, zipf:EXPONENT                           [uniform,zipf:1.2]
  --peers NAME,…    torch, gemm, candle; none                       [torch,gemm,candle]
  --without WAY,…   ways of peers, as torch-eager, that are left out
  --backward        forward and backward together
  --products        no peers: products of experts beside the peak of arithmetic
  --seconds S       of pairs per line and way of a peer; three pairs at least      [0.5]
  --shrink N        widths divided by N (2, 4), to see on few tokens whether all works  [1]
  --python PATH     a Python with torch and transformers                      [python3]
";

/// A parsed command line.
pub struct Selection {
    /// As it was given, or the defaults.
    pub command: String,
    pub shapes: Vec<Shape>,
    pub tokens: Vec<usize>,
    pub dtypes: Vec<DType>,
    pub threads: Vec<usize>,
    pub skews: Vec<Skew>,
    pub peers: Vec<String>,
    pub without: Vec<String>,
    pub pass: Pass,
    /// GEMMs alone, instead of layers with peers.
    pub products: bool,
    pub budget: Duration,
    pub python: String,
}

impl Selection {
    /// `None` when nothing is to be run.
    ///
    /// # Errors
    /// An option or a name that is not known.
    pub fn parse(args: impl Iterator<Item = String>) -> Result<Option<Selection>> {
        // What cargo adds.
        let args: Vec<String> = args.filter(|arg| arg != "--bench").collect();
        let mut selection = Selection::default_with(args.join(" "));
        let mut shrink = 1;
        let mut args = args.into_iter();
        while let Some(option) = args.next() {
            match option.as_str() {
                "--list" => return Ok(None),
                "--help" => {
                    print!("{HELP}");
                    return Ok(None);
                }
                "--backward" => selection.pass = Pass::Both,
                "--products" => selection.products = true,
                _ => {
                    let value = args.next().ok_or(format!("{option} takes a value"))?;
                    match option.as_str() {
                        "--shrink" => shrink = value.parse::<NonZeroUsize>()?.get(),
                        _ => selection.set(&option, &value)?,
                    }
                }
            }
        }
        selection
            .shapes
            .iter_mut()
            .for_each(|shape| shape.shrink(shrink));
        Ok(Some(selection))
    }

    fn default_with(command: String) -> Selection {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Selection {
            command,
            shapes: shapes("qwen3,tutel").expect("known"),
            tokens: vec![1, 8, 64, 512, 4096],
            dtypes: vec![DType::F32, DType::Bf16],
            threads: vec![cores],
            skews: vec![Skew::Uniform, Skew::Zipf(1.2)],
            peers: names("torch,gemm,candle"),
            without: Vec::new(),
            pass: Pass::Forward,
            products: false,
            budget: Duration::from_millis(500),
            python: "python3".to_string(),
        }
    }

    fn set(&mut self, option: &str, value: &str) -> Result {
        match option {
            "--shape" => self.shapes = shapes(value)?,
            "--tokens" => self.tokens = list(value)?,
            "--dtype" => self.dtypes = dtypes(value)?,
            "--threads" => self.threads = list(value)?,
            "--skew" => self.skews = list(value)?,
            "--peers" => self.peers = names(value),
            "--without" => self.without = names(value),
            "--seconds" => self.budget = Duration::try_from_secs_f64(value.parse()?)?,
            "--python" => self.python = value.to_string(),
            _ => return Err(format!("unknown option {option}\n\n{HELP}").into()),
        }
        Ok(())
    }
}

fn names(value: &str) -> Vec<String> {
    let all = value.split(',').filter(|name| *name != "none");
    all.map(str::to_string).collect()
}

fn list<T: FromStr>(value: &str) -> Result<Vec<T>>
where
    T::Err: std::fmt::Display,
{
    let one = |item: &str| item.parse().map_err(|e| format!("{item}: {e}").into());
    value.split(',').map(one).collect()
}

fn dtypes(value: &str) -> Result<Vec<DType>> {
    let one = |name: &str| match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        _ => Err(format!("{name}: types are f32 and bf16").into()),
    };
    value.split(',').map(one).collect()
}

fn shapes(value: &str) -> Result<Vec<Shape>> {
    if value == "all" {
        return Ok(SHAPES.to_vec());
    }
    let one = |name: &str| {
        let found = SHAPES.iter().find(|shape| shape.name == name);
        found.cloned().ok_or_else(|| {
            let known: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            format!("unknown shape {name}; known: {}", known.join(", ")).into()
        })
    };
    value.split(',').map(one).collect()
}
