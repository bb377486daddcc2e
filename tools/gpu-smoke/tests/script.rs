//! What `run.sh` does when steps fail, hang or are stopped: with a stand-in for the program, and
//! minutes of a second.

mod said;

use said::said;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{self, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Does for each step what a variable of its name says.
const STAND_IN: &str = r#"#!/bin/sh
step=$1
[ "$step" != suite ] || step=$2
case $step in
    facts) eval "${facts:-echo 'a stand-in, cuda:sm_90a, the driver is for CUDA 13.0'}" ;;
    unpack) eval "${unpack:-:}" ;;
    *)
        eval "does=\${$step:-}"
        eval "${does:-echo $step was here}" ;;
esac
"#;

/// A folder as `gpu-smoke` makes it, as far as the script looks into it.
struct SmokeFolder {
    folder: tempfile::TempDir,
}

impl SmokeFolder {
    fn new() -> SmokeFolder {
        let folder = tempfile::tempdir().unwrap();
        let smoke = SmokeFolder { folder };
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/run.sh");
        fs::copy(script, smoke.path("run.sh")).unwrap();
        fs::write(smoke.path("version"), "0\n").unwrap();
        fs::create_dir(smoke.path("kernels")).unwrap();
        fs::write(smoke.path("moesaic-gpu-smoke"), STAND_IN).unwrap();
        fs::set_permissions(
            smoke.path("moesaic-gpu-smoke"),
            Permissions::from_mode(0o755),
        )
        .unwrap();
        smoke
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The script, with what steps are to do.
    fn command(&self, steps: &[(&str, &str)], options: &[&str]) -> Command {
        // Tests in the background of a shell ignore SIGINT, and what ignores it cannot trap it.
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(self.path("run.sh"));
        command.arg("--out").arg(self.path("out")).args(options);
        command.env("MOESAIC_KIT_MINUTE", "1");
        command.env("tag", process::id().to_string());
        command.envs(steps.iter().copied());
        command
    }

    fn run(&self, steps: &[(&str, &str)], options: &[&str]) -> (String, Option<i32>) {
        said(&mut self.command(steps, options))
    }

    fn kept(&self, name: &str) -> String {
        fs::read_to_string(self.path("out").join(name)).unwrap()
    }

    /// The summary's line for a step.
    fn line(&self, step: &str) -> String {
        let summary = self.kept("summary.txt");
        let mut lines = summary.lines();
        let line = lines.find(|line| line.split_whitespace().next() == Some(step));
        line.unwrap_or_else(|| panic!("no {step} in\n{summary}"))
            .to_string()
    }

    #[track_caller]
    fn holds(&self, step: &str, parts: &[&str]) {
        let line = self.line(step);
        for part in parts {
            assert!(line.contains(part), "{part:?} is not in {line:?}");
        }
    }
}

/// Whether a process that sleeps so long is there, of those that this program's scripts start.
fn lives(word: &str) -> bool {
    let word = format!("{word}{}", process::id());
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.map(|process| fs::read(process.path().join("cmdline")));
    lines.flatten().any(|line| {
        line.split(|byte| *byte == 0)
            .any(|it| it == word.as_bytes())
    })
}

/// Waits for something that takes moments; `false` when it does not come.
fn comes(mut it: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        if it() {
            return true;
        }
        sleep(Duration::from_millis(20));
    }
    false
}

#[test]
fn a_step_that_fails_is_said_and_the_next_ones_run() {
    let smoke = SmokeFolder::new();
    let steps = [
        ("probe", "echo '3 of 5 rows differ'; exit 1"),
        ("conformance", "echo before; kill -SEGV $$"),
        ("oracles", "exit 4"),
        ("training", "exit 2"),
    ];
    let (text, code) = smoke.run(&steps, &[]);
    assert_eq!(code, Some(1), "{text}");
    smoke.holds("probe", &[" FAILED ", "3 of 5 rows differ"]);
    smoke.holds("check", &[" ok ", "check was here"]);
    smoke.holds("conformance", &[" ENDED 139 ", "before"]);
    smoke.holds("oracles", &[" cut "]);
    // The device is there, so that a step that cannot begin has failed.
    smoke.holds("training", &[" FAILED "]);
    smoke.holds("layers", &[" ok ", "layers was here"]);
    smoke.holds("sanitize", &[" absent "]);
    assert!(smoke.kept("1-probe.txt").contains("3 of 5 rows differ"));
    assert!(smoke.kept("1-probe.txt").contains("# the end, exit code 1"));
    assert!(text.contains("results are in "), "{text}");
}

#[test]
fn what_is_right_and_what_is_not_there_is_no_failure() {
    let smoke = SmokeFolder::new();
    let (text, code) = smoke.run(&[("oracles", "exit 4")], &[]);
    assert_eq!(code, Some(0), "{text}");
    let steps = [("facts", "echo 'no driver'; exit 2"), ("layers", "exit 2")];
    let (text, code) = smoke.run(&steps, &["--only", "layers"]);
    assert_eq!(code, Some(2), "nothing ran: {text}");
    assert!(text.contains("layers       absent "), "{text}");
}

/// Also one that does not heed TERM, and what it has started.
#[test]
fn a_step_that_hangs_is_stopped_with_all_its_processes() {
    let smoke = SmokeFolder::new();
    let steps = [
        ("probe", "echo 'a row'; sleep 1234.5$tag & sleep 1234.6$tag"),
        (
            "check",
            "echo 'a check'; trap '' TERM; sleep 1234.7$tag; sleep 1234.8$tag; sleep 1234.9$tag",
        ),
        (
            "conformance",
            "(trap '' TERM; exec sleep 1235.1$tag) & echo done",
        ),
    ];
    let (text, code) = smoke.run(&steps, &["--only", "probe,check,conformance,oracles"]);
    assert_eq!(code, Some(1), "{text}");
    smoke.holds("probe", &[" TIME UP ", "a row"]);
    smoke.holds("check", &[" TIME UP ", "a check"]);
    smoke.holds("conformance", &[" ok ", "done"]);
    smoke.holds("oracles", &[" ok "]);
    for left in ["1234.5", "1234.6", "1234.7", "1234.8", "1234.9", "1235.1"] {
        assert!(!lives(left), "sleep {left} was left");
    }
}

#[test]
fn minutes_are_shared_and_what_finds_none_is_left_out() {
    let smoke = SmokeFolder::new();
    // Of its six seconds a step has fewer, so that the one behind it has most of twelve.
    let options = ["--only", "conformance,layers", "--minutes", "12"];
    let (text, code) = smoke.run(&[("conformance", "sleep 1236.1$tag")], &options);
    assert_eq!(code, Some(1), "{text}");
    smoke.holds("conformance", &[" TIME UP "]);
    smoke.holds("layers", &[" ok "]);
    let limit = |file: &str| -> u32 {
        let text = smoke.kept(file);
        let words: Vec<_> = text.split_whitespace().collect();
        words[2].parse().unwrap()
    };
    assert!(limit("3-conformance.txt") <= 2);
    assert!((4..=12).contains(&limit("8-layers.txt")));
    let (text, code) = smoke.run(&[], &["--only", "check,layers", "--minutes", "0"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("check        left out "), "{text}");
    assert!(text.contains("layers       left out "), "{text}");
}

/// Starts the script with a step that hangs, sends it signals once that runs, the last
/// of which ends it; its exit code.
fn signalled(smoke: &SmokeFolder, signals: &[&str]) -> Option<i32> {
    let steps = [(
        "check",
        "echo 'one check'; sleep 1237.1$tag & sleep 1237.2$tag",
    )];
    let mut command = smoke.command(&steps, &[]);
    command.env("MOESAIC_KIT_MINUTE", "60");
    // A reader that goes away, as the terminal of a connection that drops does.
    let mut script = command.stdout(Stdio::piped()).spawn().unwrap();
    drop(script.stdout.take());
    assert!(comes(|| lives("1237.2")), "the step begins");
    for signal in signals {
        assert!(lives("1237.2"), "nothing but the last signal stops a step");
        let number = script.id().to_string();
        let mut kill = Command::new("sh");
        kill.args(["-c", "kill -s $0 $1", signal, &number]);
        assert!(kill.status().unwrap().success());
        sleep(Duration::from_millis(200));
    }
    let mut code = None;
    let ended = comes(|| {
        code = script.try_wait().unwrap().and_then(|status| status.code());
        code.is_some()
    });
    assert!(ended, "it ends");
    code
}

#[test]
fn a_run_that_is_stopped_keeps_what_was_done() {
    for signals in [&["TERM"][..], &["INT"], &["HUP", "TERM"]] {
        let smoke = SmokeFolder::new();
        assert_eq!(signalled(&smoke, signals), Some(130), "{signals:?}");
        smoke.holds("probe", &[" ok ", "probe was here"]);
        smoke.holds("check", &[" STOPPED ", "one check"]);
        let summary = smoke.kept("summary.txt");
        assert!(!summary.contains("conformance"), "{summary}");
        assert!(summary.contains("stopped by a signal; results are in "));
        assert!(!lives("1237.1") && !lives("1237.2"), "its processes end");
    }
}

/// `/dev/full` is a file on a full disk.
#[test]
fn results_that_cannot_be_written_are_one_clear_message() {
    let unwritable = |smoke: &SmokeFolder, steps: &[(&str, &str)]| {
        let (text, code) = smoke.run(steps, &["--only", "probe,check"]);
        assert_eq!(code, Some(2), "{text}");
        let lines = text.lines().filter(|line| line.starts_with("run.sh: "));
        assert_eq!(lines.count(), 1, "{text}");
        assert!(text.contains("results cannot be written to "), "{text}");
        text
    };
    let smoke = SmokeFolder::new();
    File::create(smoke.path("out")).unwrap();
    unwritable(&smoke, &[]);
    for (full, ran) in [("summary.txt", false), ("2-check.txt", true)] {
        let smoke = SmokeFolder::new();
        fs::create_dir(smoke.path("out")).unwrap();
        symlink("/dev/full", smoke.path("out").join(full)).unwrap();
        let text = unwritable(&smoke, &[]);
        assert_eq!(text.contains("probe        ok "), ran, "{text}");
    }
    // The disk fills while a step runs.
    let smoke = SmokeFolder::new();
    let folder = smoke.path("out");
    let fill = format!("ln -sf /dev/full {}/1-probe.txt", folder.display());
    unwritable(&smoke, &[("probe", &fill)]);
}

#[test]
fn what_is_no_option_is_refused_before_anything_runs() {
    let smoke = SmokeFolder::new();
    let refused = |options: &[&str], part: &str| {
        let (text, code) = smoke.run(&[], options);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(part), "{part:?} is not in {text}");
        assert!(!smoke.path("out").exists());
    };
    let steps = "there is no step layer; the steps are probe check conformance oracles training \
                 sanitize launches layers";
    refused(&["--only", "probe,layer"], steps);
    refused(
        &["--minutes", "ten"],
        "--minutes takes a whole number, not ten",
    );
    refused(
        &["--minutes", "08"],
        "--minutes takes a whole number, not 08",
    );
    refused(
        &["--packages", "/nowhere"],
        "--packages /nowhere is no folder",
    );
    refused(&["--nonsense"], "unknown option --nonsense");
    refused(&["--device"], "--device needs a value");
    let (text, code) = smoke.run(&[], &["--only", "probe, check"]);
    assert_eq!(code, Some(0), "{text}");
    smoke.holds("check", &[" ok "]);
}

/// What makes every step fail is said before the first.
#[test]
fn a_folder_for_another_card_an_old_driver_and_one_that_hangs_are_said_at_once() {
    let smoke = SmokeFolder::new();
    let made = |text: &str| fs::write(smoke.path("kernels/made"), text).unwrap();
    let probe = ["--only", "probe"];
    made("cuda:sm_90a 13.0\n");
    let (text, code) = smoke.run(&[], &probe);
    assert_eq!(code, Some(0), "{text}");
    assert!(!text.contains("too old"), "{text}");
    let old = "echo 'a stand-in, cuda:sm_90a, the driver is for CUDA 12.4'";
    let (text, code) = smoke.run(&[("facts", old)], &probe);
    assert_eq!(code, Some(0), "{text}");
    let part = "the driver is too old: kernels of CUDA 13.0 want one for CUDA 13.0";
    assert!(text.contains(part), "{text}");
    made("cuda:sm_80 13.0\n");
    let (text, code) = smoke.run(&[], &probe);
    assert_eq!(code, Some(2), "{text}");
    let part = "this folder is for cuda:sm_80, and the device is another: a stand-in, cuda:sm_90a";
    assert!(text.contains(part), "{text}");
    assert!(!text.contains("probe "), "{text}");
    let (text, code) = smoke.run(&[("facts", "sleep 1238.1$tag")], &probe);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("the device does not answer"), "{text}");
    let (text, code) = smoke.run(&[("unpack", "echo 'not a pack'; exit 1")], &probe);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("not a pack"), "{text}");
}
