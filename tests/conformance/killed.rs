//! Ranks that are processes, one of which is killed while experts move: what the others write
//! down is whole, and enough for other processes to go on from.

use super::layers::engine as cpu;
use super::mesh::mesh;
use super::mesh_placed::scattered;
use super::mesh_training::layer_of;
use super::migration::{check, four_steps, start, train};
use moesaic::collectives::{Call, Communicator, mpi};
use moesaic::plan::{Placement, Split};
use moesaic::toolchain::testing::mpich;
use moesaic::train::migrate::{HeldExperts, both, prepare, resume};
use moesaic::weights::{Checkpoint, Writer, write_safetensors};
use moesaic::{Engine, Mesh, Tensors};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

/// The rank that is killed, and one without which no exchange ends: it comes when the other is
/// dead.
const KILLED: usize = 2;
const LATE: usize = 1;
const SURVIVORS: [usize; 3] = [0, 1, 3];

fn placements() -> [Placement; 2] {
    let to = "7,0 | 1,6,+0 | 2,5,+7 | 3,4".parse().unwrap();
    [Placement::contiguous(4, 8), to]
}

/// Experts after that, of three ranks.
fn next() -> Placement {
    scattered(3, 8, 2, Split::Near)
}

/// Files of a test.
struct Folder(PathBuf);

impl Folder {
    fn checkpoint(&self) -> PathBuf {
        self.0.join("checkpoint")
    }

    /// Path of the tensors that a rank is left with.
    fn left(&self, rank: usize) -> PathBuf {
        self.0.join(format!("left-{rank}"))
    }

    /// Path of the list of their experts.
    fn held(&self, rank: usize) -> PathBuf {
        self.0.join(format!("held-{rank}"))
    }

    fn experts(&self, rank: usize) -> Vec<usize> {
        let held = fs::read_to_string(self.held(rank)).unwrap();
        held.split(',').map(|e| e.parse().unwrap()).collect()
    }

    /// Path of a rank's tensors after going on.
    fn after(&self, rank: usize) -> PathBuf {
        self.0.join(format!("after-{rank}"))
    }

    /// The number of the process that is killed, once it is where it is to be killed.
    fn doomed(&self) -> PathBuf {
        self.0.join("doomed")
    }

    /// Path of the resumed weights, as a whole layer.
    fn again(&self) -> PathBuf {
        self.0.join("again")
    }

    /// Starts this program again as ranks.
    fn start(&self, ranks: usize, case: &str) -> Output {
        let mut command = mpich().command(ranks, Path::new("sh"));
        command.args(["-c", WATCHED, "sh"]);
        command.arg(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "conformance::killed::a_rank"]);
        command.args(["--nocapture", "--test-threads=1"]);
        command.env("MOESAIC_KILLED", &self.0);
        command.env("MOESAIC_RANK_CASE", case);
        command.output().unwrap()
    }
}

/// A launcher ends all ranks when it loses one. It watches this, which outlives its rank until
/// the others have written down what they have.
const WATCHED: &str = r#"
"$@"
code=$?
cd "$MOESAIC_KILLED"
for i in $(seq 300); do
    [ -e left-0 ] && [ -e left-1 ] && [ -e left-3 ] && break
    sleep 0.2
done
exit $code"#;

fn said(output: &Output) -> String {
    let both = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&both).into_owned()
}

#[test]
#[ignore = "started by the other tests, under mpiexec"]
fn a_rank() {
    let folder = std::env::var_os("MOESAIC_KILLED").expect("it is started under mpiexec");
    let (folder, engine) = (Folder(folder.into()), cpu());
    let world = mpi::start(&mpi::MpiOptions::default(), engine.device().clone()).unwrap();
    match std::env::var("MOESAIC_RANK_CASE").as_deref() {
        Ok("resume") => resumes(&folder, &engine, world),
        case => loses(&folder, &engine, world, case == Ok("commit")),
    }
}

/// Two steps, a checkpoint, and then experts move: a rank is killed while rows are exchanged, or
/// while ranks tell each other that they have them.
fn loses(folder: &Folder, engine: &Engine, mut world: Communicator, in_commit: bool) {
    let (case, [from, to]) = (layer_of(24), placements());
    let whole = Mesh::new(&mut world, mesh(4, 1, 1)).unwrap();
    let before = train(&whole, &case, &start(&whole, &case), 0..2);
    let file = &mut Writer::file(folder.checkpoint());
    engine.ranks(&whole).collect(&before, file).unwrap();
    let mut world = world.with_deadline(Duration::from_secs(10));
    let whole = Mesh::new(&mut world, mesh(4, 1, 1)).unwrap();
    let (ranks, ep) = (engine.ranks(&whole), whole.place().ep);
    if !in_commit {
        meet_the_end(folder, ep);
    }
    let held = from.of(ep).into_owned();
    let left = match prepare(&ranks, &to, &before) {
        Err(_) => (held, before),
        Ok(ready) => {
            if in_commit {
                meet_the_end(folder, ep);
            }
            let Err(not) = ready.commit() else {
                panic!("one is dead, and rank {ep} was told by all")
            };
            both(
                &whole,
                HeldExperts {
                    experts: &held,
                    tensors: &before,
                },
                HeldExperts {
                    experts: &to.of(ep),
                    tensors: &not.after,
                },
            )
            .unwrap()
        }
    };
    let held: Vec<String> = left.0.iter().map(usize::to_string).collect();
    fs::write(folder.held(ep), held.join(",")).unwrap();
    write_safetensors(folder.left(ep), &left.1).unwrap();
    // The launcher is told of a process that ends without the others.
    wait_until(|| SURVIVORS.iter().all(|rank| folder.left(*rank).exists()));
    std::process::exit(0);
}

/// Blocks in the moment in which a rank is killed: each waits for a rank that
/// waits for its death.
fn meet_the_end(folder: &Folder, ep: usize) {
    let own = std::process::id();
    if ep == KILLED {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            // SAFETY: it is this process that ends.
            unsafe { libc::kill(own as i32, libc::SIGKILL) }
        });
        let file = folder.0.join("doomed.part");
        fs::write(&file, own.to_string()).unwrap();
        fs::rename(&file, folder.doomed()).unwrap();
    }
    if ep == LATE {
        wait_until(|| folder.doomed().exists());
        let process = fs::read_to_string(folder.doomed()).unwrap();
        wait_until(|| is_dead(&process));
    }
}

/// Returns true if there is no such process, or only a zombie.
fn is_dead(process: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let state = status
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    matches!(state, None | Some('Z' | 'X'))
}

fn wait_until(done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(100),
            "it does not come"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn read(file: &Path) -> Tensors<'static> {
    let file = Checkpoint::open(file).unwrap();
    let tensor = |name: &str| (name.to_string(), file.read(name).unwrap());
    file.names().map(tensor).collect()
}

/// Three other processes make the state of what the three have written, and train on.
fn resumes(folder: &Folder, engine: &Engine, mut world: Communicator) {
    let whole = Mesh::new(&mut world, mesh(3, 1, 1)).unwrap();
    let placed = whole.placed(&next()).unwrap();
    let (ranks, ep) = (engine.ranks(&placed), placed.place().ep);
    let (left, checkpoint) = (
        SURVIVORS[ep],
        Checkpoint::open(folder.checkpoint()).unwrap(),
    );
    let own = (folder.experts(left), read(&folder.left(left)));
    let resumed = resume(
        &ranks,
        HeldExperts {
            experts: &own.0,
            tensors: &own.1,
        },
        &checkpoint,
    )
    .unwrap();
    let again = &mut Writer::file(folder.again());
    ranks.collect(&resumed, again).unwrap();
    let after = train(&placed, &layer_of(24), &resumed, 2..4);
    write_safetensors(folder.after(ep), &after).unwrap();
    world.finish(&Call::new("end")).unwrap();
}

/// Checks that the files left hold at least these experts, and that resuming
/// from them learns what one undisturbed rank learns.
fn check_case(name: &str, left: [&[usize]; 3]) {
    let scratch = tempfile::tempdir().unwrap();
    let folder = Folder(scratch.path().to_path_buf());
    let text = said(&folder.start(4, name));
    let process = fs::read_to_string(folder.doomed());
    let process = process.unwrap_or_else(|_| panic!("nobody was to be killed: {text}"));
    assert!(is_dead(&process) && !folder.left(KILLED).exists(), "{text}");
    let checkpoint = read(&folder.checkpoint());
    for (rank, experts) in SURVIVORS.into_iter().zip(left) {
        assert!(folder.left(rank).exists(), "rank {rank} is lost: {text}");
        let held = folder.experts(rank);
        assert!(
            held.starts_with(experts),
            "{name}: rank {rank} has {held:?}"
        );
        let own = read(&folder.left(rank));
        assert!(own.keys().eq(checkpoint.keys()), "{name}: rank {rank}");
    }
    let output = folder.start(3, "resume");
    assert!(output.status.success(), "{name}: {}", said(&output));
    let again = read(&folder.again());
    assert!(again.len() == checkpoint.len() && !again.is_empty());
    for (name, tensor) in &checkpoint {
        assert!(again[name.as_str()] == *tensor, "`{name}` is another");
    }
    let ranks = [0, 1, 2].map(|rank| read(&folder.after(rank)));
    check(&four_steps(&layer_of(24)), &ranks, mesh(3, 1, 1), &next());
}

/// Some may have got what they need by then, some not.
#[test]
fn others_resume_when_a_process_is_killed_while_experts_are_exchanged() {
    check_case("exchange", [&[0, 1], &[2, 3], &[6, 7]]);
}

#[test]
fn others_resume_when_a_process_is_killed_while_ranks_confirm() {
    let both: [&[usize]; 3] = [&[0, 1, 7, 0], &[2, 3, 1, 6, 0], &[6, 7, 3, 4]];
    check_case("commit", both);
}
