//! `moesaic launch`.

use crate::common;
use crate::common::{Finished, Small, command, finish, scratch, write};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Variables of launchers, should the tests themselves run under one.
const LAUNCHERS: [&str; 8] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MASTER_ADDR",
    "MOESAIC_MPI",
];

/// The naps of this run of the tests: an earlier one may have left some behind.
fn own_naps(text: &str) -> String {
    text.replace("7000.", &format!("7{:07}.", std::process::id()))
}

/// Ranks that run a shell script.
pub fn launch(options: &[&str], script: &str) -> Command {
    let mut command = command();
    LAUNCHERS.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.arg("launch").args(options);
    command.args(["--", "sh", "-c", &own_naps(script)]);
    command
}

pub fn run(options: &[&str], script: &str) -> Finished {
    finish(&mut launch(options, script))
}

/// Processes that have this word among their arguments.
fn alive(word: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).replace('\0', " "))
    });
    lines
        .filter(|line| line.split(' ').any(|other| other == word))
        .collect()
}

/// Waits until no process has the word any more.
#[track_caller]
fn none_is_left(word: &str) {
    let (start, word) = (Instant::now(), own_naps(word));
    while !alive(&word).is_empty() {
        let left = alive(&word);
        assert!(start.elapsed() < Duration::from_secs(60), "left: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn signal(child: &Child, name: &str) {
    let pid = child.id().to_string();
    let sent = Command::new("kill")
        .args([&format!("-{name}"), &pid])
        .status();
    assert!(sent.unwrap().success());
}

/// Reads lines until `count` of them end in `words`.
fn until(out: &mut impl BufRead, count: usize, words: &str) {
    let mut seen = 0;
    while seen < count {
        let mut line = String::new();
        assert!(out.read_line(&mut line).unwrap() > 0, "the output ended");
        seen += usize::from(line.trim_end().ends_with(words));
    }
}

#[test]
fn ranks_have_torchruns_variables_and_their_lines_prefixes() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT; \
                  printf 'no end' >&2";
    let done = run(&["-n", "3", "--mpi", "off", "--port", "29512"], script);
    let mut lines: Vec<&str> = done.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "[0] 0 0 3 3 127.0.0.1:29512",
            "[1] 1 1 3 3 127.0.0.1:29512",
            "[2] 2 2 3 3 127.0.0.1:29512"
        ]
    );
    let mut errors: Vec<&str> = done.stderr.lines().collect();
    errors.sort_unstable();
    assert_eq!(errors, ["[0] no end", "[1] no end", "[2] no end"]);
    assert_eq!(done.code, 0);
}

#[test]
fn lines_stay_whole_however_they_come() {
    // Pieces of lines from four ranks at once, and lines longer than a pipe's page.
    let script = "i=0; while [ $i -lt 40 ]; do printf 'a%s' $RANK; printf 'b%s' $RANK; \
                  printf '%06000d\\n' $RANK; i=$((i+1)); done";
    let text = run(&["-n", "4", "--mpi", "off", "--no-prefix"], script).ok();
    assert_eq!(text.lines().count(), 160);
    for rank in 0..4 {
        let whole = format!("a{rank}b{rank}{rank:06000}");
        let count = text.lines().filter(|line| *line == whole).count();
        assert_eq!(count, 40, "rank {rank}");
    }
}

#[test]
fn the_first_failure_ends_all_and_gives_the_code() {
    // One ignores the request to end, and each has a child, one in a session of its own.
    let script = "sleep 7000.11 & setsid sleep 7000.11 & [ $RANK = 2 ] && exit 3; \
                  [ $RANK = 1 ] && trap '' TERM; while true; do sleep 7000.11; done";
    let start = Instant::now();
    for mpi in ["off", "on"] {
        let options = ["-n", "4", "--grace", "0.3", "--mpi", mpi];
        let done = finish(&mut with_mpi(launch(&options, script)));
        assert_eq!(done.code, 3, "{}", done.stderr);
        assert_eq!(
            done.stderr,
            "error: rank 2 ended with exit code 3; the others are ended\n"
        );
        none_is_left("7000.11");
    }
    assert!(start.elapsed() < Duration::from_secs(120));
}

#[test]
fn a_killed_rank_is_named_with_the_signal() {
    let done = run(
        &["-n", "2", "--mpi", "off"],
        "[ $RANK = 1 ] && kill -9 $$; sleep 7000.12",
    );
    assert_eq!(done.code, 137);
    let words = "rank 1 ended with exit code 137 (signal 9)";
    assert!(done.stderr.contains(words), "{}", done.stderr);
    none_is_left("7000.12");
}

#[test]
fn what_a_rank_leaves_behind_ends_with_the_job() {
    let script = "sleep 7000.13 & setsid sleep 7000.13 & echo done";
    let text = run(&["-n", "2", "--mpi", "off"], script).ok();
    assert_eq!(text.matches("done").count(), 2);
    none_is_left("7000.13");
}

#[test]
fn a_signal_ends_the_job() {
    for (mpi, name, code) in [
        ("off", "INT", 130),
        ("off", "TERM", 143),
        ("on", "TERM", 143),
        // Open MPI says much about ranks that end, none of which is the job's failure.
        ("open", "INT", 130),
        ("open", "TERM", 143),
    ] {
        let script = "echo ready; sleep 7000.14 & wait";
        let options = ["-n", "2", "--mpi", if mpi == "off" { "off" } else { "on" }];
        let mut command = with_mpi(launch(&options, script));
        if mpi == "open" {
            by_open_mpi(&mut command);
        }
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        until(&mut out, 2, "ready");
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(code));
        none_is_left("7000.14");
    }
}

#[test]
fn a_killed_launcher_leaves_nobody_behind() {
    for mpi in ["off", "on"] {
        let script = "sleep 7000.15 & echo ready; wait";
        let mut command = with_mpi(launch(&["-n", "2", "--mpi", mpi], script));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        until(&mut out, 2, "ready");
        child.kill().unwrap();
        child.wait().unwrap();
        none_is_left("7000.15");
    }
}

/// `mpiexec` ends its processes with SIGKILL, and knows nothing of what they started.
#[test]
fn a_killed_rank_of_the_launcher_leaves_nobody_behind() {
    let script = "setsid sleep 7000.18 & echo ready $PPID; sleep 7000.18 & wait";
    let mut command = launch(&["-n", "1", "--mpi", "off", "--no-prefix"], script);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let keeper = line.trim().strip_prefix("ready ").unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{keeper}/stat")).unwrap();
    let rank = stat.rsplit_once(") ").unwrap().1.split(' ').nth(1).unwrap();
    let killed = Command::new("kill").args(["-KILL", rank]).status();
    assert!(killed.unwrap().success());
    // The code of what was killed, or of the program, which is asked to end then.
    let code = child.wait().unwrap().code().unwrap();
    assert!([137, 143].contains(&code), "{code}");
    none_is_left("7000.18");
}

#[test]
fn a_reader_that_leaves_ends_the_job() {
    let script = "sleep 7000.16 & while true; do echo y; done";
    let mut command = launch(&["-n", "2", "--mpi", "off"], script);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 10]).unwrap();
    drop(out);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    none_is_left("7000.16");
}

/// A reader that stops reading holds nobody back from being ended.
#[test]
fn a_job_whose_output_nobody_reads_can_be_ended() {
    let mut command = launch(&["-n", "2", "--mpi", "off"], "while true; do echo y; done");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let mut reader = BufReader::with_capacity(16, out);
    until(&mut reader, 1, "y");
    signal(&child, "TERM");
    // What is in the pipes is read to the end.
    reader.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

/// The processors that this process may use.
fn own_processors() -> Vec<usize> {
    moesaic::cpu::processors().unwrap()
}

#[test]
fn ranks_are_bound_to_numa_nodes() {
    let dir = scratch();
    let own = own_processors();
    // Two nodes made of the processors that are there; where there is one, it is the
    // first node's alone and nothing is bound.
    let (first, second) = own.split_at(own.len().div_ceil(2));
    let list = |numbers: &[usize]| {
        let words: Vec<String> = numbers.iter().map(usize::to_string).collect();
        words.join(",")
    };
    for (node, numbers) in [("node0", first), ("node1", second)] {
        let folder = dir.path().join("devices/system/node").join(node);
        std::fs::create_dir_all(&folder).unwrap();
        write(&folder, "cpulist", &list(numbers));
    }
    // One GPU, on the second node.
    let gpu = dir.path().join("bus/pci/devices/0000:3b:00.0");
    std::fs::create_dir_all(&gpu).unwrap();
    for (file, text) in [
        ("class", "0x030200"),
        ("vendor", "0x10de"),
        ("numa_node", if second.is_empty() { "0" } else { "1" }),
    ] {
        write(&gpu, file, text);
    }
    let script = "grep Cpus_allowed_list /proc/self/status | cut -f 2";
    let ranks = |bind: &str, sysfs: &Path| {
        let sysfs = sysfs.to_str().unwrap();
        let options = ["-n", "2", "--mpi", "off", "--bind", bind, "--sysfs", sysfs];
        let mut command = launch(&options, script);
        let done = finish(
            command
                .env("MOESAIC_LOG", "info")
                .env_remove("CUDA_VISIBLE_DEVICES"),
        );
        let mut lines: Vec<String> = done.stdout.lines().map(str::to_string).collect();
        lines.sort();
        (lines, done.stderr)
    };
    let bound = if second.is_empty() { &own } else { second };
    let expected = |numbers: &[usize]| {
        let text = ranges(numbers);
        [format!("[0] {text}"), format!("[1] {text}")]
    };
    let (lines, log) = ranks("numa", dir.path());
    assert_eq!(lines, expected(bound));
    assert!(log.contains("of GPU 0000:3b:00.0"), "{log}");
    assert_eq!(ranks("off", dir.path()).0, expected(&own));
    // Without GPUs ranks go round the nodes.
    std::fs::remove_dir_all(dir.path().join("bus")).unwrap();
    let (lines, _) = ranks("numa", dir.path());
    let other = if second.is_empty() { &own } else { second };
    let first = if second.is_empty() { &own } else { first };
    assert_eq!(
        lines,
        [
            format!("[0] {}", ranges(first)),
            format!("[1] {}", ranges(other))
        ]
    );
}

/// As the system writes a list.
fn ranges(numbers: &[usize]) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut rest = numbers;
    while let Some(first) = rest.first() {
        let run = rest
            .iter()
            .enumerate()
            .take_while(|(i, n)| **n == first + i);
        let count = run.count();
        words.push(match count {
            1 => first.to_string(),
            _ => format!("{first}-{}", first + count - 1),
        });
        rest = &rest[count..];
    }
    words.join(",")
}

/// The machine's Open MPI, which root may use.
fn by_open_mpi(command: &mut Command) -> &mut Command {
    let library = moesaic::toolchain::testing::open_mpi().library;
    command
        .env("MOESAIC_MPI", library)
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
}

/// Installed, if it is not yet, where `launch` looks for it: in the user's cache.
fn with_mpi(mut command: Command) -> Command {
    let _ = moesaic::toolchain::testing::installed(moesaic::toolchain::ToolKind::Mpi);
    command.env("MOESAIC_CACHE", moesaic::cache::home().unwrap());
    command
}

/// This test program as the ranks.
fn ranks(options: &[&str]) -> Command {
    let command = with_mpi(launch(options, ""));
    let program = std::env::current_exe().unwrap();
    let arguments: Vec<_> = command
        .get_args()
        .map(std::ffi::OsStr::to_os_string)
        .collect();
    let end = arguments.iter().position(|word| word == "--").unwrap();
    let mut ranks = Command::new(command.get_program());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => ranks.env(name, value),
            None => ranks.env_remove(name),
        };
    }
    ranks.args(&arguments[..=end]).arg(program);
    ranks.args([
        "--ignored",
        "--exact",
        "launch::a_rank",
        "--nocapture",
        "--test-threads=1",
    ]);
    ranks
}

/// What a rank does: tells all others who it is, by MPI.
#[test]
#[ignore = "started by the other tests, under `moesaic launch`"]
fn a_rank() {
    use moesaic::collectives::{Call, Collectives, mpi};
    let device = std::sync::Arc::new(moesaic::cpu::CpuDevice::with_threads(1).unwrap());
    let mut world = match mpi::start(&mpi::MpiOptions::default(), device) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(4);
        }
    };
    let own = format!("{}/{}", world.rank(), world.size());
    let call = Call::new("who");
    let all = world.gather_bytes(own.as_bytes(), &call).unwrap();
    let all: Vec<String> = all
        .into_iter()
        .map(|bytes| String::from_utf8(bytes).unwrap())
        .collect();
    println!(
        "I am {own} by {}, with {}",
        world.transport(),
        all.join(" ")
    );
    world.finish(&call).unwrap();
}

#[test]
fn ranks_exchange_data_by_mpi() {
    let text = finish(&mut ranks(&["-n", "3"])).ok();
    for rank in 0..3 {
        let said = format!("I am {rank}/3 by MPI (MPICH");
        let mut lines = text.lines();
        let found =
            lines.any(|line| line.starts_with(&format!("[{rank}] ")) && line.contains(&said));
        assert!(found, "{text}");
    }
    assert_eq!(text.matches(", with 0/3 1/3 2/3\n").count(), 3, "{text}");
}

#[test]
fn ranks_exchange_data_by_the_machines_open_mpi() {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|f| f.join("mpirun.openmpi").is_file());
    let tool = moesaic::toolchain::testing::ExternalTool::OpenMpi;
    let found = found.then_some(()).ok_or("mpirun.openmpi is not on PATH");
    moesaic::toolchain::testing::needed(tool, found);
    let mut ranks = ranks(&["-n", "3", "--allow-run-as-root"]);
    ranks.env("MOESAIC_MPI", "libmpi.so.40");
    let text = finish(&mut ranks).ok();
    assert!(text.contains("by MPI (Open MPI"), "{text}");
    assert_eq!(text.matches(", with 0/3 1/3 2/3\n").count(), 3, "{text}");
}

/// Without MPI's launcher no rank takes itself for a whole world.
#[test]
fn torchruns_variables_alone_are_no_mpi_world() {
    let mut ranks = ranks(&["-n", "2", "--mpi", "off"]);
    let library = moesaic::toolchain::mpi(&moesaic::toolchain::Registry::open().unwrap());
    let done = finish(ranks.env("MOESAIC_MPI", library.unwrap().library));
    assert_eq!(done.code, 4, "{}{}", done.stdout, done.stderr);
    assert!(done.stderr.contains("moesaic launch"), "{}", done.stderr);
    assert!(!done.stdout.contains("I am"), "{}", done.stdout);
}

#[test]
fn doctor_measures_between_ranks_that_were_launched() {
    let mut command = with_mpi(command());
    LAUNCHERS.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.args(["launch", "-n", "3", "--no-prefix", "--"]);
    command.arg(env!("CARGO_BIN_EXE_moesaic"));
    let found = finish(command.args(["doctor", "--ranks", "--json"])).json();
    let carrier = found["carrier"].as_str().unwrap();
    assert!(carrier.starts_with("MPI (MPICH"), "{carrier}");
    assert_eq!(found["ranks"].as_array().unwrap().len(), 3);
    assert_eq!(found["shape"]["per_node"], 3);
    assert_eq!(found["differences"].as_array().unwrap().len(), 0);
    let links = found["links"].as_array().unwrap();
    assert_eq!(links.len(), 3);
    for link in links {
        assert!(link["seconds"].as_f64().unwrap() > 0.0, "{link}");
        assert!(link["bytes_per_second"].as_f64().unwrap() > 0.0, "{link}");
        assert_eq!(link["same_node"], true);
    }
    let version = &found["ranks"][2]["versions"];
    assert_eq!(version["moesaic"], env!("CARGO_PKG_VERSION"));
    assert!(
        version["MPI"].as_str().unwrap().contains("MPICH"),
        "{version}"
    );
}

#[test]
fn doctor_measures_between_threads() {
    let mut two = command();
    let text = finish(two.args(["doctor", "--ranks", "2"])).ok();
    assert!(
        text.starts_with("2 ranks by threads: 1 node of 2 ranks each"),
        "{text}"
    );
    assert!(text.contains("ranks of a node"), "{text}");
    assert!(!text.contains("ranks of two nodes"), "{text}");
    let mut one = command();
    let text = finish(one.args(["doctor", "--ranks", "1"])).ok();
    assert!(text.starts_with("1 rank by threads"), "{text}");
    let mut none = command();
    LAUNCHERS.iter().for_each(|name| {
        none.env_remove(name);
    });
    finish(none.args(["doctor", "--ranks"])).fails(2, &["moesaic launch -n 4"]);
    let mut both = command();
    finish(both.args(["doctor", "--ranks=2", "--cache=x"])).fails(2, &["cannot be used with"]);
    let mut alone = command();
    finish(alone.args(["doctor", "--expect=1,2"])).fails(2, &["--ranks"]);
    let mut slow = command();
    let slow = finish(slow.args(["doctor", "--ranks=2", "--expect=1e9,0"]));
    assert_eq!(slow.code, 1, "{}", slow.stderr);
    assert!(
        slow.stdout.contains("slow: ranks of a node"),
        "{}",
        slow.stdout
    );
    let words = "less than half of what --expect says";
    assert!(slow.stderr.contains(words), "{}", slow.stderr);
}

/// A layer whose experts are on three processes, as on one.
#[test]
fn launched_ranks_share_a_layer() {
    let small = Small::new();
    let run = ["run", "--target", "cpu:portable", "--spec"];
    let ranks = |launch: &[&str], output: &Path| {
        let mut command = with_mpi(command());
        LAUNCHERS.iter().for_each(|name| {
            command.env_remove(name);
        });
        if !launch.is_empty() {
            command.args(launch).arg(env!("CARGO_BIN_EXE_moesaic"));
        }
        command.args(run).arg(&small.spec).arg("--weights");
        command.arg(&small.weights).arg("--input").arg(&small.input);
        finish(command.arg("--output").arg(output)).ok();
        common::load(output, "y")
    };
    let one = ranks(&[], &small.output);
    let three = small.dir.path().join("three.safetensors");
    assert_eq!(ranks(&["launch", "-n", "3", "--"], &three), one);
}
