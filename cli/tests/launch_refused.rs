//! What `moesaic launch` refuses to start, and what it says and exits with.

use crate::common::{command, finish, scratch, write};
use crate::launch::{launch, run};

#[test]
fn contradictions_are_refused() {
    for (name, value, words) in [
        ("RANK", "0", "RANK is set: this process is a rank already"),
        ("PMI_SIZE", "2", "PMI_SIZE is set"),
        ("MASTER_ADDR", "node7", "MASTER_ADDR is node7"),
    ] {
        let mut command = launch(&["-n", "2"], "echo started");
        finish(command.env(name, value)).fails(2, &[words, "hint: "]);
    }
    let own = run(&["-n", "1", "--mpi", "off"], "true");
    assert_eq!(own.code, 0);
    let mut missing = command();
    missing.args(["launch", "-n", "2", "--", "/no/such/program"]);
    finish(&mut missing).fails(127, &["there is no program /no/such/program"]);
    let dir = scratch();
    let text = write(dir.path(), "text", "no program");
    let options = ["launch", "-n", "2", "--mpi", "off", "--"];
    for (program, words) in [
        (text.as_path(), "text is not executable"),
        (dir.path(), "is a folder, and no program"),
    ] {
        finish(command().args(options).arg(program)).fails(126, &[words]);
    }
    // By the search path, too, where a folder has the name and no program does.
    let mut found = command();
    found.args(options).arg("text").env("PATH", dir.path());
    finish(&mut found).fails(126, &["/text is not executable", "hint: chmod +x"]);
    // Executable, but its interpreter is not.
    let odd = write(dir.path(), "odd", &format!("#!{}\n", text.display()));
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&odd, mode).unwrap();
    let done = finish(command().args(options).arg(&odd));
    assert_eq!(done.code, 126, "{}", done.stderr);
    let broken = write(dir.path(), "broken", "#!/no/such/interpreter\n");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&broken, mode).unwrap();
    let mut broken_command = command();
    broken_command
        .args(["launch", "-n", "2", "--mpi", "off", "--"])
        .arg(&broken);
    let done = finish(&mut broken_command);
    assert_eq!(done.code, 127);
    assert!(done.stderr.contains("cannot start"), "{}", done.stderr);
    for wrong in [["-n", "0"], ["-n", "300"], ["--grace", "-1"]] {
        let mut command = command();
        command.arg("launch").args(wrong).args(["--", "true"]);
        assert_eq!(finish(&mut command).code, 2, "{wrong:?}");
    }
}

#[test]
fn an_mpiexec_that_fails_says_why() {
    let dir = scratch();
    let fake = write(
        dir.path(),
        "mpiexec",
        "#!/bin/sh\necho no hosts today >&2\nexit 9\n",
    );
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(fake, mode).unwrap();
    let mut command = launch(&["-n", "2"], "true");
    command.env("MOESAIC_MPI", dir.path().join("libmpi_abi.so.1"));
    finish(&mut command).fails(1, &["mpiexec failed:", "no hosts today"]);
}

/// Open MPI refuses root, as in every container, unless it is told otherwise.
#[test]
fn root_says_so_or_has_ranks_without_open_mpi() {
    // SAFETY: takes nothing.
    let root = unsafe { libc::geteuid() } == 0;
    let dir = scratch();
    let text = "#!/bin/sh\n[ \"$1\" = --version ] && echo 'mpiexec (OpenRTE) 4.1.4' && exit\n\
                echo \"allowed: $OMPI_ALLOW_RUN_AS_ROOT $PRTE_ALLOW_RUN_AS_ROOT_CONFIRM\" >&2; exit 9\n";
    let fake = write(dir.path(), "mpiexec", text);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(fake, mode).unwrap();
    let start = |options: &[&str], named: bool| {
        let mut command = launch(options, "echo rank $RANK");
        for name in ["OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"] {
            command.env_remove(name);
        }
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", dir.path().display()));
        // No MPI is installed in this cache.
        command.env("MOESAIC_CACHE", dir.path().join("cache"));
        // Empty is as if it were not set.
        let library = if named {
            dir.path().join("libmpi.so.99")
        } else {
            "".into()
        };
        finish(command.env("MOESAIC_MPI", library))
    };
    let allowed = start(&["-n", "1", "--allow-run-as-root"], true);
    allowed.fails(1, &[if root { "allowed: 1 1" } else { "allowed:" }]);
    if root {
        start(&["-n", "1"], true).fails(2, &["starts no ranks as root", "--allow-run-as-root"]);
        let plain = start(&["-n", "2"], false);
        assert!(
            plain.stderr.contains("ranks are plain processes"),
            "{}",
            plain.stderr
        );
        assert_eq!(plain.ok().matches("rank ").count(), 2);
    }
    start(&["-n", "1", "--mpi", "off", "--allow-run-as-root"], false).fails(2, &["leave one"]);
}
