//! Banks of LDS in the GEMMs on AMD's matrix cores: lanes that it serves at once meet in none.
//!
//! No manual says which lanes these are. The groups here were measured by others, on MI300 and MI350
//! (triton-lang/triton#11365); that adjacent lanes go together, as on older GPUs, is held, too.

use crate::gpu_compile::{mixtral, qwen3};
use moesaic_emit::emit;
use moesaic_kernel::Target;
use moesaic_plan::{KernelPlan, PlanOptions, Training, plan};
use moesaic_spec::LayerSpec;
use std::collections::BTreeSet;
use std::process::Command;

const LANES: usize = 64;

/// Groups of lanes that are served at once: all that differ from one of them by sums of these.
fn served(basis: &[usize]) -> Served {
    let mut sums = vec![0];
    for lanes in basis {
        sums.extend(sums.clone().iter().map(|sum| sum ^ lanes));
    }
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for lane in 0..LANES {
        if !groups.iter().any(|group| group.contains(&lane)) {
            groups.push(sums.iter().map(|sum| lane ^ sum).collect());
        }
    }
    groups
}

/// Groups of lanes.
type Served = Vec<Vec<usize>>;

/// LDS of an architecture.
struct Banks {
    /// The lanes that a read serves together, in each way that is possible.
    reads: Vec<Served>,
    writes: Served,
    /// Chunks of 16 bytes that the banks are wide.
    width: usize,
}

impl Banks {
    fn of(arch: &str) -> Banks {
        let adjacent = served(&[1, 2, 4]);
        let (reads, width) = match arch {
            "gfx950" => (vec![served(&[1, 2, 4 | 8, 4 | 16])], 16),
            _ => (vec![served(&[1, 2, 4 | 16]), adjacent.clone()], 8),
        };
        Banks {
            reads,
            writes: adjacent,
            width,
        }
    }
}

/// A kernel's tile of shared memory.
struct Tile {
    name: String,
    /// Where a chunk of a line is: `[line][chunk]`.
    place: Vec<Vec<usize>>,
    edge: usize,
    /// Lines that stages turn around.
    turned: bool,
}

impl Tile {
    fn chunks(&self) -> usize {
        self.place[0].len()
    }

    fn of(kernel: &KernelPlan, target: Target) -> Tile {
        let text = emit(kernel, target).unwrap().text;
        let config = kernel.op.gemm().unwrap();
        let element = if text.contains("typedef f32 Element") {
            4
        } else {
            2
        };
        let edge = after(&text, "constexpr int EDGE = ");
        Tile {
            name: format!("{} for {target}", kernel.name),
            place: places(&text, config.tile_depth * element / 16),
            edge,
            turned: text.contains("struct TurnedStage"),
        }
    }

    /// No bank has two chunks of lanes that are served at once.
    fn meets_nowhere(&self, groups: &[Vec<usize>], width: usize, at: impl Fn(usize) -> usize) {
        for group in groups {
            let chunks: BTreeSet<usize> = group.iter().map(|&lane| at(lane)).collect();
            let banks: BTreeSet<usize> = chunks.iter().map(|chunk| chunk % width).collect();
            assert_eq!(banks.len(), chunks.len(), "{}: lanes {group:?}", self.name);
        }
    }

    /// Reads of a product: its rows are lines as they are, or columns, of which a lane has a run.
    fn check_reads(&self, groups: &[Vec<usize>], width: usize) {
        let (edge, share) = (self.edge, LANES / self.edge);
        let sums = edge / share;
        let run = 64 / edge * sums;
        let column = |part: usize, row: usize| {
            row / 4 % share * run + part * sums + row / 4 / share * 4 + row % 4
        };
        for first in (0..128).step_by(64) {
            for step in (0..self.chunks()).step_by(share) {
                for part in 0..64 / edge {
                    let row = |lane: usize| first + part * edge + lane % edge;
                    let chunk = |lane: usize| step + lane / edge;
                    self.meets_nowhere(groups, width, |lane| self.place[row(lane)][chunk(lane)]);
                    if self.turned {
                        let of = |lane: usize| first + column(part, lane % edge);
                        self.meets_nowhere(groups, width, |lane| self.place[of(lane)][chunk(lane)]);
                    }
                }
            }
        }
    }

    /// Writes: whole lines, or a chunk of every second one.
    fn check_writes(&self, groups: &[Vec<usize>], width: usize) {
        let chunks = self.chunks();
        self.meets_nowhere(groups, width, |lane| {
            self.place[lane / chunks][lane % chunks]
        });
        for lines in [64, 128].into_iter().filter(|_| self.turned) {
            for odd in [0, 1] {
                let line = |lane: usize| lane % (lines / 2) * 2 + odd;
                let chunk = |lane: usize| lane / (lines / 2);
                self.meets_nowhere(groups, width, |lane| self.place[line(lane)][chunk(lane)]);
            }
        }
    }
}

/// The number behind some words.
fn after(text: &str, words: &str) -> usize {
    let rest = text.split(words).nth(1).expect(words);
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap();
    rest[..end].parse().unwrap()
}

/// Returns the result of `place` in a kernel's text for each chunk of 128 lines, computed in C++.
fn places(text: &str, chunks: usize) -> Vec<Vec<usize>> {
    let function = text.split("DEVICE i32 place(").nth(1).expect("a place");
    let function = &function[..function.find("}\n").unwrap()];
    let program = format!(
        "#include <cstdio>\ntypedef int i32;\nconstexpr int CHUNKS = {chunks};\n\
         static i32 place({function}}}\n\
         int main() {{ for (int i = 0; i < 128 * CHUNKS; i++) std::printf(\"%d\\n\", place(i / CHUNKS, i % CHUNKS)); }}\n"
    );
    let dir = tempfile::tempdir().unwrap();
    let (source, binary) = (dir.path().join("place.cpp"), dir.path().join("place"));
    std::fs::write(&source, program).unwrap();
    let compiled = Command::new("c++")
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .status();
    assert!(compiled.expect("a C++ compiler").success(), "{function}");
    let output = Command::new(&binary).output().unwrap().stdout;
    let numbers = String::from_utf8(output).unwrap();
    let numbers: Vec<usize> = numbers.lines().map(|line| line.parse().unwrap()).collect();
    let all: BTreeSet<usize> = numbers.iter().copied().collect();
    assert!(
        all.into_iter().eq(0..128 * chunks),
        "each chunk has a place"
    );
    numbers.chunks(chunks).map(<[usize]>::to_vec).collect()
}

/// The tiles of both passes of layers with tiles of either height.
fn tiles(arch: &str) -> Vec<Tile> {
    let target: Target = format!("rocm:{arch}").parse().unwrap();
    let options = PlanOptions::training(Training::default());
    let mut sparse = mixtral();
    (sparse.shape.experts, sparse.shape.top_k) = (60, 1);
    let layers: [LayerSpec; 3] = [mixtral(), qwen3(), sparse];
    let mut tiles = Vec::new();
    for spec in layers {
        let plan = plan(&spec, target, &options).unwrap();
        let on_unit = |kernel: &&KernelPlan| kernel.family() == Some("mfma");
        tiles.extend(
            plan.kernels
                .iter()
                .filter(on_unit)
                .map(|kernel| Tile::of(kernel, target)),
        );
    }
    tiles
}

#[test]
fn lanes_meet_in_no_bank() {
    for arch in ["gfx90a", "gfx942", "gfx950"] {
        let Banks {
            reads,
            writes,
            width,
        } = Banks::of(arch);
        let tiles = tiles(arch);
        for edge in [16, 32] {
            let of_edge = tiles.iter().filter(|tile| tile.edge == edge);
            assert!(of_edge.clone().any(|tile| tile.turned), "{arch}: {edge}");
            for tile in of_edge {
                reads
                    .iter()
                    .for_each(|groups| tile.check_reads(groups, width));
                tile.check_writes(&writes, width);
            }
        }
    }
}
