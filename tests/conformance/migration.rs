//! Experts that move between steps: what is learned is the same, and what is left when a rank
//! is lost on the way is enough to go on from.

use super::case::{Case, host};
use super::layers::engine as cpu;
use super::mesh::{mesh, on_ranks, part, shares};
use super::mesh_placed::scattered;
use super::mesh_training::{TOKENS, layer_of};
use super::trained::RNG_KEY;
use moesaic::collectives::threads;
use moesaic::engine::joined_placed;
use moesaic::kernel::DType;
use moesaic::mesh::ProcessGroup;
use moesaic::plan::{Placement, Split, moves};
use moesaic::tensor::{SourceError, WeightSource};
use moesaic::train::mesh::{MeshOptimizer, Scaling, parts, update_mesh};
use moesaic::train::migrate::{HeldExperts, both, prepare, resume};
use moesaic::train::{AdamW, masters};
use moesaic::weights::{Checkpoint, Writer};
use moesaic::{LayerOptions, Mesh, Parallel, Tensor, Tensors, Training};
use std::ops::Range;
use std::path::Path;
use std::sync::Barrier;

#[path = "../../examples/moving_experts.rs"]
#[allow(dead_code)]
mod moving_experts;

/// The first parameters of a rank.
pub fn start(mesh: &Mesh, case: &Case) -> Tensors<'static> {
    let whole = case.host_weights();
    let names = whole.keys().map(String::as_str);
    masters(&parts(mesh, &whole, names).unwrap())
}

/// Steps of AdamW from a rank's parameters and optimizer state to the same.
pub fn train(mesh: &Mesh, case: &Case, from: &Tensors<'_>, steps: Range<u64>) -> Tensors<'static> {
    let (engine, all) = (cpu(), from.clone().into_iter());
    let (state, parameters): (Vec<_>, Vec<_>) = all
        .map(|(name, tensor)| (name, tensor.into_static()))
        .partition(|(name, _)| name.starts_with("optimizer."));
    let state: Tensors<'static> = state.into_iter().collect();
    let mut parameters: Tensors<'static> = parameters.into_iter().collect();
    let training = Some(Training::default());
    let layer = engine.layer_with(
        &case.spec,
        &parameters,
        LayerOptions {
            part: true,
            ..LayerOptions::over(mesh).training(training)
        },
    );
    let layer = layer.unwrap_or_else(|e| panic!("{e}"));
    let adam = AdamW {
        epsilon: 1e-2,
        ..AdamW::new(2e-2)
    };
    let mut optimizer = MeshOptimizer::new(&layer.ranks().unwrap(), adam);
    if !state.is_empty() {
        optimizer.restore(&state).unwrap();
    }
    let tokens = &shares(TOKENS, mesh.parallel().ranks())[mesh.rank()];
    let (own, width) = (part(case, tokens), case.spec.output_dim());
    for step in steps {
        let (_, saved) = layer.forward_train(&own.input(), RNG_KEY).unwrap();
        let dy = &case.dy(step)[tokens.start * width..tokens.end * width];
        let dy = host(DType::F32, &[tokens.len(), width], dy);
        layer.backward(&saved, &dy, false).unwrap();
        update_mesh(&layer, &mut optimizer, &mut parameters, Scaling::default()).unwrap();
    }
    let state = optimizer.state(&parameters).unwrap();
    parameters.extend(state);
    parameters
}

/// Four steps of one rank.
pub fn four_steps(case: &Case) -> Tensors<'static> {
    let ranks = on_ranks(&cpu(), mesh(1, 1, 1), |mesh| {
        train(mesh, case, &start(mesh, case), 0..4)
    });
    ranks.into_iter().next().unwrap()
}

/// Holds what ranks have against that of one.
pub fn check(want: &Tensors<'_>, ranks: &[Tensors<'static>], parallel: Parallel, to: &Placement) {
    for (name, want) in want {
        let of = |place| ranks[parallel.rank(place)][name].lend();
        let found = match ProcessGroup::of(parallel, name) {
            ProcessGroup::World => ranks[0][name].lend(),
            _ => joined_placed(name, (parallel, Some(to)), of),
        };
        assert_eq!(found.shape, want.shape, "{to}: {name}");
        for (found, want) in found.to_f32().iter().zip(want.to_f32()) {
            assert!(
                (found - want).abs() < 4e-6,
                "{to}: `{name}` is {found}, not {want}"
            );
        }
    }
}

#[test]
fn experts_that_move_learn_as_if_they_had_not() {
    let case = layer_of(24);
    let want = four_steps(&case);
    assert!(want.contains_key("optimizer.first.experts.up.weight"));
    for parallel in [mesh(3, 1, 1), mesh(2, 2, 1), mesh(2, 1, 2)] {
        let to = scattered(parallel.ep, 8, 17, Split::Even);
        let back = Placement::contiguous(parallel.ep, 8);
        assert!(!moves(&back, &to).unwrap().moves.is_empty());
        let ranks = on_ranks(&cpu(), parallel, |mesh| {
            let before = train(mesh, &case, &start(mesh, &case), 0..2);
            let prepared = prepare(&cpu().ranks(mesh), &to, &before).unwrap();
            let moved = prepared.mesh().clone();
            let after = prepared.commit().unwrap();
            // There and back again it is the same.
            let home = prepare(&cpu().ranks(&moved), &back, &after).unwrap();
            assert!(home.commit().unwrap() == before);
            train(&moved, &case, &after, 2..4)
        });
        check(&want, &ranks, parallel, &to);
    }
}

/// When a rank is lost.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
enum Lost {
    BeforeItSends,
    BeforeItConfirms,
    /// Some may have heard from all by then, some not.
    WhileOthersListen,
    AfterAllHaveConfirmed,
}

/// The state that a rank is left with.
struct Left {
    held: Vec<usize>,
    tensors: Tensors<'static>,
    /// Whether its experts have moved.
    moved: bool,
}

/// Two steps, a checkpoint, and then experts move, with one of four ranks killed.
fn killed(case: &Case, lost: Lost, (from, to): (&Placement, &Placement), file: &Path) -> Vec<Left> {
    let engine = cpu();
    let device = |_| Ok(engine.device().clone());
    // A panic ends what others are in the middle of: these keep them apart.
    let (saved, prepared, confirmed) = (Barrier::new(4), Barrier::new(4), Barrier::new(4));
    let left = threads::run(4, device, |mut world| {
        let mesh = Mesh::new(&mut world, mesh(4, 1, 1)).unwrap();
        let mesh = mesh.placed(from).unwrap();
        let (ranks, ep) = (engine.ranks(&mesh), mesh.place().ep);
        let dies = |when| {
            if lost == when && ep == 2 {
                std::panic::resume_unwind(Box::new("killed"));
            }
        };
        let before = train(&mesh, case, &start(&mesh, case), 0..2);
        ranks.collect(&before, &mut Writer::file(file)).unwrap();
        saved.wait();
        dies(Lost::BeforeItSends);
        let held = from.of(ep).into_owned();
        let Ok(ready) = prepare(&ranks, to, &before) else {
            assert_eq!(lost, Lost::BeforeItSends);
            return Left {
                held,
                tensors: before,
                moved: false,
            };
        };
        if lost > Lost::BeforeItSends {
            prepared.wait();
        }
        dies(Lost::BeforeItConfirms);
        let committed = ready.commit();
        dies(Lost::WhileOthersListen);
        if lost == Lost::AfterAllHaveConfirmed {
            confirmed.wait();
        }
        dies(Lost::AfterAllHaveConfirmed);
        match committed {
            Err(not) => {
                let after = HeldExperts {
                    experts: &to.of(ep),
                    tensors: &not.after,
                };
                let (held, tensors) = both(
                    &mesh,
                    HeldExperts {
                        experts: &held,
                        tensors: &before,
                    },
                    after,
                )
                .unwrap();
                Left {
                    held,
                    tensors,
                    moved: false,
                }
            }
            Ok(tensors) => Left {
                held: to.of(ep).into_owned(),
                tensors,
                moved: true,
            },
        }
    });
    let left: Vec<_> = left.unwrap().into_iter().flatten().collect();
    assert_eq!(left.len(), 3, "{lost:?}");
    left
}

#[test]
fn nothing_is_lost_with_a_rank() {
    let case = layer_of(24);
    let want = four_steps(&case);
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (
        Placement::contiguous(4, 8),
        "7,0 | 1,6,+0 | 2,5,+7 | 3,4".parse().unwrap(),
    );
    for lost in [
        Lost::BeforeItSends,
        Lost::BeforeItConfirms,
        Lost::WhileOthersListen,
        Lost::AfterAllHaveConfirmed,
    ] {
        let [file, again] = ["", "again"].map(|kind| folder.path().join(format!("{lost:?}{kind}")));
        let left = killed(&case, lost, (&from, &to), &file);
        let moved = left.iter().filter(|one| one.moved).count();
        match lost {
            Lost::WhileOthersListen => println!("{moved} of 3 have heard from all"),
            Lost::AfterAllHaveConfirmed => assert_eq!(moved, 3),
            _ => assert_eq!(moved, 0, "{lost:?}"),
        }
        let checkpoint = Checkpoint::open(&file).unwrap();
        let next = scattered(3, 8, 2, Split::Near);
        let parallel = mesh(3, 1, 1);
        let ranks = on_ranks(&cpu(), parallel, |mesh| {
            let mesh = mesh.placed(&next).unwrap();
            let (ranks, own) = (cpu().ranks(&mesh), &left[mesh.rank()]);
            let resumed = resume(
                &ranks,
                HeldExperts {
                    experts: &own.held,
                    tensors: &own.tensors,
                },
                &checkpoint,
            )
            .unwrap();
            ranks.collect(&resumed, &mut Writer::file(&again)).unwrap();
            train(&mesh, &case, &resumed, 2..4)
        });
        let found = Checkpoint::open(&again).unwrap();
        for name in checkpoint.names() {
            let [a, b] = [&checkpoint, &found].map(|file| file.read(name).unwrap());
            assert!(a == b, "{lost:?}: `{name}`");
        }
        check(&want, &ranks, parallel, &next);
    }
}

/// A checkpoint of which nothing is to be read.
struct Sealed<'a>(&'a Checkpoint);

impl WeightSource for Sealed<'_> {
    fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
        self.0.describe(name)
    }

    fn rows(&self, name: &str, _: Range<usize>) -> Result<Tensor<'_>, SourceError> {
        Err(format!("`{name}` was read").into())
    }
}

#[test]
fn what_others_have_is_not_read_and_other_steps_are_refused() {
    let case = layer_of(24);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let from: Placement = "0-1,+4 | 2-3,+5 | 4-5 | 6-7".parse().unwrap();
    let to = Placement::contiguous(4, 8);
    let left = killed(&case, Lost::BeforeItSends, (&from, &to), &file);
    let checkpoint = Checkpoint::open(&file).unwrap();
    let old = folder.path().join("old");
    on_ranks(&cpu(), mesh(3, 1, 1), |mesh| {
        let (ranks, own) = (cpu().ranks(mesh), &left[mesh.rank()]);
        // Replicas of the lost rank's experts are elsewhere.
        let resumed = resume(
            &ranks,
            HeldExperts {
                experts: &own.held,
                tensors: &own.tensors,
            },
            &Sealed(&checkpoint),
        )
        .unwrap();
        ranks
            .collect(&resumed, &mut Writer::file(folder.path().join("again")))
            .unwrap();
        let early = train(mesh, &case, &start(mesh, &case), 0..1);
        ranks.collect(&early, &mut Writer::file(&old)).unwrap();
        // Without these replicas a checkpoint is needed, and not of the step before.
        let keep: Vec<usize> = (0..2).collect();
        let few: Tensors<'_> = own
            .tensors
            .iter()
            .map(|(name, tensor)| {
                let of_experts = mesh.process_group(name) == ProcessGroup::ExpertDp;
                let own = if of_experts {
                    tensor.rows(0..2).unwrap()
                } else {
                    tensor.lend()
                };
                (name.clone(), own)
            })
            .collect();
        let held: Vec<usize> = keep.iter().map(|at| own.held[*at]).collect();
        ranks.barrier("written").unwrap();
        let old = Checkpoint::open(&old).unwrap();
        let error = resume(
            &ranks,
            HeldExperts {
                experts: &held,
                tensors: &few,
            },
            &old,
        )
        .unwrap_err()
        .to_string();
        assert!(error.contains("of another step"), "{error}");
        resume(
            &ranks,
            HeldExperts {
                experts: &held,
                tensors: &few,
            },
            &checkpoint,
        )
        .unwrap();
    });
}

/// Who has heard from all has forgotten what was before, the others have both: any mix of
/// them is enough, with the checkpoint for what the lost rank had.
#[test]
fn any_mix_of_before_and_after_is_enough() {
    let case = layer_of(24);
    let folder = tempfile::tempdir().unwrap();
    let [file, again] = ["file", "again"].map(|name| folder.path().join(name));
    let to: Placement = "7,0 | 1,6,+0 | 2,5,+7 | 3,4".parse().unwrap();
    let all = on_ranks(&cpu(), mesh(4, 1, 1), |mesh| {
        let ranks = cpu().ranks(mesh);
        let before = train(mesh, &case, &start(mesh, &case), 0..1);
        ranks.collect(&before, &mut Writer::file(&file)).unwrap();
        let after = prepare(&ranks, &to, &before).unwrap().commit().unwrap();
        let ep = mesh.place().ep;
        let held = Placement::contiguous(4, 8).of(ep).into_owned();
        let moved = HeldExperts {
            experts: &to.of(ep),
            tensors: &after,
        };
        let two = both(
            mesh,
            HeldExperts {
                experts: &held,
                tensors: &before,
            },
            moved,
        )
        .unwrap();
        both(
            mesh,
            HeldExperts {
                experts: &[9],
                tensors: &before,
            },
            moved,
        )
        .unwrap_err();
        (two, (to.of(ep).into_owned(), after))
    });
    let checkpoint = Checkpoint::open(&file).unwrap();
    for heard in 0..8 {
        let left: Vec<&(Vec<usize>, Tensors<'static>)> = [0, 1, 3]
            .iter()
            .enumerate()
            .map(|(bit, &rank)| match heard >> bit & 1 {
                0 => &all[rank].0,
                _ => &all[rank].1,
            })
            .collect();
        on_ranks(&cpu(), mesh(3, 1, 1), |mesh| {
            let (ranks, own) = (cpu().ranks(mesh), left[mesh.rank()]);
            let resumed = resume(
                &ranks,
                HeldExperts {
                    experts: &own.0,
                    tensors: &own.1,
                },
                &checkpoint,
            )
            .unwrap();
            ranks.collect(&resumed, &mut Writer::file(&again)).unwrap();
        });
        let found = Checkpoint::open(&again).unwrap();
        for name in checkpoint.names() {
            let [a, b] = [&checkpoint, &found].map(|file| file.read(name).unwrap());
            assert!(a == b, "{heard:03b}: `{name}`");
        }
    }
}

/// A balancer, moves and new layers, on the way of a run: examples/moving_experts.rs.
#[test]
fn a_run_whose_busy_experts_move_learns_the_same() {
    let [stay, moves] = [false, true].map(|moves| moving_experts::run(&cpu(), moves).unwrap());
    assert_eq!(stay.len(), moves.len());
    let placed = |at: usize| &moves[at].placement;
    let changes = (1..moves.len())
        .filter(|at| placed(*at) != placed(at - 1))
        .count();
    assert!(changes > 0, "nothing has moved: {moves:?}");
    assert!(stay.iter().all(|step| step.placement == stay[0].placement));
    let [one, two] = [&stay, &moves].map(|steps| steps.last().unwrap());
    assert!(two.busiest < 0.75 * one.busiest, "{two:?}, not {one:?}");
    let fall = stay[0].loss - one.loss;
    assert!(fall > 0.02 * stay[0].loss, "{stay:?}");
    for (one, two) in stay.iter().zip(&moves) {
        let off = (one.loss - two.loss).abs();
        assert!(off < 1e-4 * fall, "{two:?}, not {one:?}");
    }
}
