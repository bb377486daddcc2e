//! The options of a run of the bench.

use crate::Result;
use crate::party::Kind;
use crate::shapes::{SHAPES, Shape};
use moesaic::DType;
use std::str::FromStr;
use std::time::Duration;

const HELP: &str = "\
cargo bench -p moesaic-benches --bench ranks -- [OPTIONS]

  --shape NAME,…    those of the bench of layers; tutel-8, Tutel's with 8 experts [olmoe-half,qwen3]
  --tokens N,…      of all ranks together                               [0,1,8,64,512,4096]
  --dtype NAME,…    f32, bf16                                                   [f32,bf16]
  --pass NAME,…     forward, both                                           [forward,both]
  --kinds NAME,…    threads, mpi: beside one process; tutel: beside mpi      [threads,mpi]
  --ranks N,…                                                                          [2]
  --seconds S       of rounds per line; five rounds at least                           [1]
  --python PATH     a Python with torch and Tutel, see benches/peers/README.md   [python3]
";

/// The passes of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    Forward,
    /// Forward, backward, and the sum of gradients over ranks.
    Both,
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Pass::Forward => "forward",
            Pass::Both => "both",
        })
    }
}

impl FromStr for Pass {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Pass, String> {
        match name {
            "forward" => Ok(Pass::Forward),
            "both" => Ok(Pass::Both),
            _ => Err(format!("{name}: passes are forward and both")),
        }
    }
}

/// A parsed command line.
pub struct Selection {
    /// As it was given.
    pub command: String,
    pub shapes: Vec<Shape>,
    pub tokens: Vec<usize>,
    pub dtypes: Vec<DType>,
    pub passes: Vec<Pass>,
    pub kinds: Vec<Kind>,
    pub ranks: Vec<usize>,
    pub budget: Duration,
    pub python: String,
}

impl Selection {
    /// `None` when nothing is to be run.
    ///
    /// # Errors
    /// An option or a name that is not known.
    pub fn parse(args: Vec<String>) -> Result<Option<Selection>> {
        // What cargo adds.
        let args: Vec<String> = args.into_iter().filter(|arg| arg != "--bench").collect();
        let mut selection = Selection {
            command: args.join(" "),
            shapes: vec![shape("olmoe-half")?, shape("qwen3")?],
            tokens: vec![0, 1, 8, 64, 512, 4096],
            dtypes: vec![DType::F32, DType::Bf16],
            passes: vec![Pass::Forward, Pass::Both],
            kinds: vec![Kind::Threads, Kind::Mpi],
            ranks: vec![2],
            budget: Duration::from_secs(1),
            python: "python3".to_string(),
        };
        let mut args = args.into_iter();
        while let Some(option) = args.next() {
            match option.as_str() {
                "--list" => return Ok(None),
                "--help" => {
                    print!("{HELP}");
                    return Ok(None);
                }
                _ => {
                    let value = args.next().ok_or(format!("{option} takes a value"))?;
                    selection.set(&option, &value)?;
                }
            }
        }
        Ok(Some(selection))
    }

    fn set(&mut self, option: &str, value: &str) -> Result {
        match option {
            "--shape" => self.shapes = value.split(',').map(shape).collect::<Result<_>>()?,
            "--tokens" => self.tokens = list(value)?,
            "--dtype" => self.dtypes = value.split(',').map(dtype).collect::<Result<_>>()?,
            "--pass" => self.passes = list(value)?,
            "--kinds" => self.kinds = list(value)?,
            "--ranks" => self.ranks = list(value)?,
            "--seconds" => self.budget = Duration::try_from_secs_f64(value.parse()?)?,
            "--python" => self.python = value.to_string(),
            _ => return Err(format!("unknown option {option}\n\n{HELP}").into()),
        }
        Ok(())
    }
}

fn list<T: FromStr>(value: &str) -> Result<Vec<T>>
where
    T::Err: std::fmt::Display,
{
    let one = |item: &str| item.parse().map_err(|e| format!("{item}: {e}").into());
    value.split(',').map(one).collect()
}

pub fn dtype(name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::Bf16),
        _ => Err(format!("{name}: types are f32 and bf16").into()),
    }
}

/// A shape by its name. Tutel's has two experts; on four ranks it would have to cut them.
pub fn shape(name: &str) -> Result<Shape> {
    let known = name.strip_suffix("-8").unwrap_or(name);
    let found = SHAPES.iter().find(|shape| shape.name == known);
    match (name, found) {
        ("tutel-8", Some(shape)) => Ok(Shape {
            name: "tutel-8",
            experts: 8,
            ..shape.clone()
        }),
        (_, Some(shape)) if known == name => Ok(shape.clone()),
        _ => {
            let known: Vec<&str> = SHAPES.iter().map(|shape| shape.name).collect();
            let known = known.join(", ");
            Err(format!("unknown shape {name}; known: {known}, tutel-8").into())
        }
    }
}
