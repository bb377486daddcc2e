use super::*;

#[test]
fn every_machine_that_ships_reads() {
    for name in published_names() {
        let machine = published(name).unwrap();
        assert_eq!(machine.name, name);
        assert!(machine.levels.iter().all(|level| !level.source.is_empty()));
    }
}

#[test]
fn what_is_wrong_is_named() {
    let error = published("h100ib").unwrap_err().to_string();
    assert!(error.contains("did you mean `h100-ib`?"), "{error}");
    let text = include_str!("../machines/h800.toml");
    let read = |from: &str, to: &str| Machine::from_toml(&text.replacen(from, to, 1));
    let error = read("alpha_us", "alhpa_us").unwrap_err().to_string();
    assert!(error.contains("did you mean `alpha_us`?"), "{error}");
    let error = read("radix = 8", "radix = 0").unwrap_err().to_string();
    assert!(error.contains("nvlink.radix = 0; only the last"), "{error}");
    let error = read("alpha_us", "hidden = 1.5\nalpha_us").unwrap_err();
    assert!(
        error.to_string().contains("nvlink.hidden = 1.5; a part"),
        "{error}"
    );
    let error = read("memory_gbs = ", "memory_gbs = -")
        .unwrap_err()
        .to_string();
    assert!(error.contains("must be from 1e-6 to 1e12"), "{error}");
}

/// Products of absurd figures are infinite or no numbers, and a plan of them says nothing.
#[test]
fn figures_that_no_machine_has_are_refused() {
    let text = include_str!("../machines/hiermoe-a6000.toml");
    let shared = "shared = 8";
    let band = text
        .lines()
        .find(|line| line.starts_with("ranks = "))
        .unwrap();
    let bandwidth = text
        .lines()
        .find(|line| line.starts_with("bandwidth_gbs"))
        .unwrap();
    let alpha = text
        .lines()
        .find(|line| line.starts_with("alpha_us"))
        .unwrap();
    let rates = text
        .lines()
        .find(|line| line.starts_with("gemm_tflops"))
        .unwrap();
    for (from, to, part) in [
        (bandwidth, "bandwidth_gbs = 5e-324", "= 0.000"),
        (
            bandwidth,
            "bandwidth_gbs = 1e13",
            "must be from 1e-6 to 1e12",
        ),
        (bandwidth, "bandwidth_gbs = nan", "= NaN; must be from 1e-6"),
        (alpha, "alpha_us = inf", "= inf; must be from 0 to 1e12"),
        (alpha, "alpha_us = -1.0", "= -1; must be from 0 to 1e12"),
        (
            shared,
            "shared = 9",
            "shared = 9; a link is of at least one rank",
        ),
        (
            shared,
            "shared = 0",
            "shared = 0; a link is of at least one rank",
        ),
        (band, "ranks = 0", "error.ranks = 0"),
        (
            rates,
            "gemm_tflops = {}",
            "compute.gemm_tflops = {}; rates are of f32, f16",
        ),
        (
            rates,
            "gemm_tflops = { bf61 = 3.0 }",
            "compute.gemm_tflops.bf61 = 3; rates are of",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        let error = Machine::from_toml(&text.replacen(from, to, 1)).unwrap_err();
        assert!(error.to_string().contains(part), "{to}: {error}");
    }
}

#[test]
fn a_machine_has_no_more_ranks_than_its_last_level() {
    let mut machine = published("hiermoe-a6000").unwrap();
    assert!(machine.check_ranks(1 << 40).is_ok());
    machine.levels[1].radix = 2;
    assert!(machine.check_ranks(16).is_ok());
    let said = machine.check_ranks(17).unwrap_err().to_string();
    assert_eq!(
        said,
        "machine hiermoe-a6000 has at most 16 ranks, the job 17"
    );
    // Four ranks on a node share its link among four.
    let about = machine.about.clone();
    let smaller = machine.with_per_node(4);
    assert_eq!(smaller.about, format!("{about}; here 4 a node"));
    assert_eq!(
        (smaller.levels[1].shared, smaller.check_ranks(9).is_err()),
        (4, true)
    );
}

#[test]
fn links_have_half_of_their_rate_where_they_say_so() {
    let level = Level {
        name: "link".to_string(),
        radix: 0,
        alpha_us: 0.0,
        bandwidth_gbs: 40.0,
        half_size_kib: 4.0,
        half_peers: 3.0,
        fanout: Fanout {
            free: 10.0,
            per_peer: 0.1,
        },
        hidden: 0.0,
        factors: Vec::new(),
        shared: 2,
        source: String::new(),
    };
    assert_eq!(level.rate(3.0), 10e9);
    let many = level.rate(20.0);
    assert!((many - 20e9 * 20.0 / 23.0 / 2.0).abs() < 1.0, "{many}");
    assert!((level.per_message() * 20e9 - 4096.0).abs() < 1e-6);
}

#[test]
fn factors_are_met_and_interpolated() {
    let of = |peers, kib, by| Factor {
        peers,
        kib,
        by,
        again: None,
    };
    let all = [
        of(4.0, 64.0, 1.0),
        of(1.0, 1.0, 1.0),
        of(1.0, 16.0, 4.0),
        of(4.0, 1.0, 9.0),
    ];
    let near = |peers, kib, by: f64| {
        let found = factor(&all, peers, kib);
        assert!((found / by - 1.0).abs() < 1e-9, "{peers} {kib}: {found}");
    };
    for Factor { peers, kib, by, .. } in all {
        near(peers, kib, by);
    }
    near(1.0, 4.0, 2.0);
    near(4.0, 8.0, 3.0);
    near(2.0, 1.0, 3.0);
    // Beyond the measured range.
    near(0.5, 0.1, 1.0);
    near(64.0, 1e6, 1.0);
    assert_eq!(factor(&[], 3.0, 1.0), 1.0);
}
