//! Ranks that no other transport connects: they meet in a folder or at an address, then run every
//! operation over the stand-in for NCCL alone.

mod nccl_fake;
mod support;

use moesaic_collectives::nccl::{self, Meeting, Nccl, NcclOptions};
use moesaic_collectives::{CollectiveError, Collectives, World, with_heartbeat};
use nccl_fake::Lab;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use support::{call, every_operation};

fn options(lab: &Lab, rank: usize, size: usize, meeting: &Meeting, job: &str) -> NcclOptions {
    NcclOptions {
        world: Some(World::new(rank, size).unwrap()),
        meeting: Some(meeting.clone()),
        job: Some(job.to_string()),
        deadline: Some(Duration::from_secs(20)),
        ..lab.options()
    }
}

/// Returns the result of each of these ranks, run as threads.
fn run<T: Send>(ranks: &[usize], body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let start = |rank: &usize| {
            let rank = *rank;
            scope.spawn(move || body(rank))
        };
        let threads: Vec<_> = ranks.iter().map(start).collect();
        let results = threads.into_iter().map(|thread| thread.join().unwrap());
        results.collect()
    })
}

fn use_it(mut world: Nccl) {
    let device = Arc::clone(world.device());
    every_operation(&mut world, &device);
    let names = world.gather_bytes(format!("rank {}", world.rank()).as_bytes(), &call("names"));
    assert_eq!(
        names.unwrap()[world.size() - 1],
        format!("rank {}", world.size() - 1).as_bytes()
    );
    world.finish(&call("finish")).unwrap();
}

/// Returns an unused port.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn ranks_meet_in_a_folder_whatever_an_earlier_run_has_left() {
    let lab = Lab::new();
    let folder = tempfile::tempdir().unwrap();
    let meeting = Meeting::Folder(folder.path().to_path_buf());
    // Rank 2 never comes: the others report that and leave their cards behind.
    let texts = run(&[0, 1], |rank| {
        let options = NcclOptions {
            deadline: Some(Duration::from_millis(300)),
            ..options(&lab, rank, 3, &meeting, "a job")
        };
        nccl::start(lab.device(rank), &options)
            .err()
            .unwrap()
            .to_string()
    });
    assert!(texts[0].contains("2 of 3 did not come to"), "{}", texts[0]);
    assert!(
        texts[1].contains("rank 0 has left nothing for rank 1"),
        "{}",
        texts[1]
    );
    assert!(folder.path().read_dir().unwrap().count() >= 2);
    run(&[0, 1, 2], |rank| {
        let options = options(&lab, rank, 3, &meeting, "a job");
        let world = nccl::start(lab.device(rank), &options).unwrap();
        // A rank that compiles is waited for even where no eager messages compare operations.
        let mut world = world.with_deadline(Duration::from_millis(1000));
        let compile = || {
            std::thread::sleep(Duration::from_millis(700 * rank as u64));
            Ok::<_, CollectiveError>(())
        };
        with_heartbeat(&mut world, &call("kernels"), compile).unwrap();
        use_it(world.with_deadline(Duration::from_secs(20)));
    });
    assert_eq!(
        folder.path().read_dir().unwrap().count(),
        0,
        "files were left"
    );
    lab.legal();
    assert_eq!(lab.live(), 0);
}

#[test]
fn ranks_meet_at_an_address_and_know_their_own() {
    let lab = Lab::new();
    let port = free_port();
    let meeting = Meeting::Loopback(port);
    run(&[0, 1, 2, 3, 4, 5], |number| match number {
        // A rank of another job gets no answer.
        3 => {
            let options = NcclOptions {
                deadline: Some(Duration::from_millis(500)),
                ..options(&lab, 1, 3, &meeting, "another job")
            };
            let error = nccl::start(lab.device(9), &options)
                .err()
                .unwrap()
                .to_string();
            assert!(
                error.contains("rank 1 was not answered by rank 0"),
                "{error}"
            );
        }
        // Strangers: one sends something else, one sends nothing.
        4 | 5 => {
            for _ in 0..100 {
                if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                    let words: &[u8] = if number == 4 { b"GET / HTTP/1.1" } else { b"" };
                    let _ = stream.write_all(words);
                    std::thread::sleep(Duration::from_millis(300));
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        rank => {
            if rank == 0 {
                // The late host makes the others retry.
                std::thread::sleep(Duration::from_millis(100));
            }
            let options = options(&lab, rank, 3, &meeting, "a job");
            use_it(nccl::start(lab.device(rank), &options).unwrap());
        }
    });
    lab.legal();
    assert_eq!(lab.live(), 0);
}

#[test]
fn who_does_not_come_is_named() {
    let lab = Lab::new();
    let meeting = Meeting::Loopback(free_port());
    let texts = run(&[0, 2], |rank| {
        let options = NcclOptions {
            deadline: Some(Duration::from_millis(400)),
            ..options(&lab, rank, 4, &meeting, "a job")
        };
        nccl::start(lab.device(rank), &options)
            .err()
            .unwrap()
            .to_string()
    });
    assert!(
        texts[0].contains("of 4 did not come to 127.0.0.1:"),
        "{}",
        texts[0]
    );
    assert!(texts[0].contains("rank 1, "), "{}", texts[0]);
    assert!(texts[1].contains("rank 2 was not answered"), "{}", texts[1]);
    let nobody = Meeting::Address("192.0.2.1".to_string(), 4000);
    let options = options(&lab, 0, 2, &nobody, "a job");
    let error = nccl::start(lab.device(0), &options)
        .err()
        .unwrap()
        .to_string();
    let words = "MASTER_ADDR must be an address of rank 0's machine";
    assert!(error.contains(words), "{error}");
}

#[test]
fn one_rank_meets_nobody() {
    let lab = Lab::new();
    let alone = options(&lab, 0, 1, &Meeting::Alone, "a job");
    use_it(nccl::start(lab.device(0), &alone).unwrap());
    lab.legal();
}
