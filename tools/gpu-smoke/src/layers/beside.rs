//! The peers of a table.

use crate::Result;
use crate::pass::Pass;
use crate::peer::{Peer, Variant};
use crate::timing::{Placed, median};
use crate::{answer, gradient};
use moesaic::Layer;
use std::path::Path;
use std::process::Command;

/// Peers that are there, and what they have done so far.
pub struct Peers {
    peers: Vec<Peer>,
    variants: Vec<Column>,
    pass: Pass,
}

/// One variant of a peer to run the layer of a table.
struct Column {
    variant: Variant,
    /// It agreed with us on this line's input.
    agrees: bool,
    /// Their time over ours, turn by turn.
    ratios: Vec<f64>,
}

/// Calls of a peer's turn, at most, and milliseconds.
const CALLS: f64 = 200.0;
const TURN_MS: f64 = 20.0;

impl Peers {
    pub fn none() -> Peers {
        Peers {
            peers: Vec::new(),
            variants: Vec::new(),
            pass: Pass::Forward,
        }
    }

    /// Starts torch's script; says who is there.
    pub fn start(python: &str, folder: &Path) -> Peers {
        let mut peers = Peers::none();
        let mut command = Command::new(python);
        command.arg(folder.join("torch_layer.py"));
        command.args(["--device", "cuda"]);
        match Peer::spawn("torch", &mut command) {
            Ok((peer, title)) => {
                println!("# torch: {title}");
                peers.peers.push(peer);
            }
            Err(problem) => println!("# torch is absent: {problem}"),
        }
        peers
    }

    pub fn any(&self) -> bool {
        !self.peers.is_empty()
    }

    /// TFLOP/s of torch's large product.
    pub fn product(&mut self) -> Option<f64> {
        let words = self.peers.first_mut()?.ask("limit bf16").ok()?;
        let gflops: f64 = words.first()?.parse().ok()?;
        Some(gflops / 1e3)
    }

    /// Reads a layer, for tables of one pass.
    pub fn load(&mut self, folder: &Path, pass: Pass) {
        self.pass = pass;
        self.variants.clear();
        for (index, peer) in self.peers.iter_mut().enumerate() {
            let variants = peer.load(index, folder, pass).into_iter();
            self.variants.extend(variants.map(|variant| Column {
                variant,
                agrees: false,
                ratios: Vec::new(),
            }));
        }
    }

    /// Nobody is in the next table.
    pub fn unload(&mut self) {
        self.variants.clear();
    }

    pub fn titles(&self) -> String {
        let titles = self
            .variants
            .iter()
            .map(|column| format!("  {:>14}", column.variant.title));
        titles.collect()
    }

    /// Holds everyone's results for the input file against what our last call left; weights'
    /// gradients too where asked, which takes seconds for large layers.
    pub fn compare(&mut self, placed: &Placed<'_>, layer: &Layer, input: &Path, gradients: bool) {
        for peer in &mut self.peers {
            // A peer that cannot says so again when it is to run.
            let _ = peer.ask(&format!("input {}", input.display()));
        }
        for column in &mut self.variants {
            let path = input.with_file_name("answer.safetensors");
            let order = format!(
                "check {} {} {}",
                column.variant.name,
                self.pass,
                path.display()
            );
            let answer = self.peers[column.variant.peer].ask(&order);
            let result = answer.and_then(|_| agree(placed, layer, &path, gradients));
            if let Err(problem) = &result {
                println!("# {} is left out: {problem}", column.variant.title);
            }
            column.agrees = result.is_ok();
            column.ratios.clear();
        }
    }

    /// Everyone's turn after ours, which took so many milliseconds a call.
    pub fn turn(&mut self, ours: f64) {
        for column in self.variants.iter_mut().filter(|column| column.agrees) {
            let peer = &mut self.peers[column.variant.peer];
            // As many as fill a turn, by how long the last took.
            let one = ours * column.ratios.last().copied().unwrap_or(1.0);
            let count = (TURN_MS / one).clamp(1.0, CALLS) as usize;
            match peer.run(&column.variant, self.pass, count) {
                Ok(times) => {
                    let times = times.iter().map(|time| time.as_secs_f64() * 1e3);
                    column
                        .ratios
                        .extend(median(times.collect()).map(|time| time / ours));
                }
                Err(problem) => {
                    println!("# {} is left out: {problem}", column.variant.title);
                    column.agrees = false;
                }
            }
        }
    }

    /// The columns of a line.
    pub fn ratios(&self) -> String {
        let columns = self.variants.iter().map(|column| {
            match median(column.ratios.clone()).filter(|_| column.agrees) {
                Some(ratio) => format!("  {ratio:14.2}"),
                None => format!("  {:>14}", "-"),
            }
        });
        columns.collect()
    }
}

fn agree(placed: &Placed<'_>, layer: &Layer, path: &Path, gradients: bool) -> Result {
    let width = layer.spec().shape.model_dim;
    answer::agrees(path, placed.dtype(), |name| {
        match name.strip_prefix("grad.") {
            Some(weight) if gradients => Ok(Some((gradient::of(layer, weight)?, None))),
            Some(_) => Ok(None),
            None => Ok(Some((placed.rows(name)?, Some(width)))),
        }
    })
}
