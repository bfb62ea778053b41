//! Runs of programs that stand for the benchmarks: they end well, fail, hang, or are interrupted.

mod stage;

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use report::plan::{Need, Step};
use report::record::{Record, State};
use report::run::{all, Places};
use serde_json::Value;
use stage::Stage;

impl Stage {
    fn run(&self, steps: &[Step], budget: u64, stop: &AtomicBool) -> Record {
        let places =
            Places { out: self.path("out"), programs: self.path("."), target: self.path(".") };
        all(&places, steps, budget, Record::default(), stop).unwrap()
    }
}

fn step(name: &'static str, program: &'static str) -> Step {
    let arguments = vec!["--x".into()];
    Step { name, title: name, program, arguments, expected: 1, through: None, needs: &[] }
}

/// The record on disk is the one returned.
fn same_on_disk(stage: &Stage, record: &Record) {
    let text = fs::read(stage.path("out/data/run.json")).unwrap();
    let there: Record = serde_json::from_slice(&text).unwrap();
    assert_eq!(&there, record);
}

#[test]
fn what_fails_is_recorded_and_the_others_go_on() {
    let stage = Stage::new(&[
        ("good", "echo '{\"hop\": []}' > \"$file\""),
        ("bad", "echo one; echo 'cannot: no memory' >&2; echo half > \"$file\"; exit 3"),
        ("silent", "exit 0"),
    ]);
    // An earlier run's samples are of another commit.
    fs::create_dir_all(stage.path("out/data")).unwrap();
    fs::write(stage.path("out/data/codec.json"), "{\"old\": 1}").unwrap();
    let guests = Step { needs: &[Need::SwapGuests], ..step("swap", "good") };
    let steps = [
        step("codec", "bad"),
        step("pool", "silent"),
        step("redis", "nothing"),
        guests,
        step("hop", "good"),
    ];
    let record = stage.run(&steps, 300, &AtomicBool::new(false));
    let states: Vec<State> = record.steps.iter().map(|step| step.state).collect();
    use State::{Done, Failed, LeftOut};
    assert_eq!(states, [Failed, Failed, LeftOut, LeftOut, Done]);
    assert!(record.steps[0].why.contains("exit status: 3: cannot: no memory"), "{record:?}");
    assert!(record.steps[1].why.contains("it wrote no figures"));
    assert!(record.steps[2].why.contains("nothing is not built"));
    assert!(record.steps[3].why.contains("scripts/fetch-qemu 10"));
    assert!(record.complete && !record.interrupted);
    same_on_disk(&stage, &record);
    let files: Vec<_> =
        fs::read_dir(stage.path("out/data")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(files.len(), 2, "{files:?}");
    let page = stage.page();
    assert!(page.contains("cannot: no memory") && page.contains("nothing is not built"));
}

#[test]
fn whole_figures_of_a_program_that_failed_are_shown_with_the_failure() {
    let figures = r#"{"table": {"rows": []}, "bytes": 4096}"#;
    let script = format!("echo '{figures}' > \"$file\"; echo '2 moves failed'; exit 1");
    let stage = Stage::new(&[("fails", &script)]);
    let record = stage.run(&[step("pool", "fails")], 300, &AtomicBool::new(false));
    assert_eq!(record.steps[0].state, State::Failed);
    assert!(stage.path("out/data/pool.json").exists());
    let page = stage.page();
    assert!(page.contains("Not whole") && page.contains("2 moves failed; its figures"), "{page}");
}

#[test]
fn a_program_that_hangs_is_ended_when_the_time_is_used_up() {
    let stage = Stage::new(&[("hangs", "sleep 1000"), ("good", "echo '{}' > \"$file\"")]);
    let long = Step { expected: 1000, ..step("pool", "good") };
    // A busy machine may take a part of the time before it begins, or all of it.
    let record = (0..5)
        .map(|_| {
            let steps = [step("codec", "hangs"), long.clone()];
            stage.run(&steps, 4, &AtomicBool::new(false))
        })
        .find(|record| record.steps[0].state != State::LeftOut)
        .expect("each time no time was left");
    assert_eq!(record.steps[0].state, State::Failed);
    let ended = |left| format!("did not end in the {left} s");
    assert!((1..=4).any(|left| record.steps[0].why.contains(&ended(left))), "{record:?}");
    assert_eq!(record.steps[1].state, State::LeftOut);
    assert!(record.steps[1].why.contains("it takes 1000 s"), "{record:?}");
    // The load was watched meanwhile.
    assert!(!record.steps[0].others.is_empty(), "{record:?}");
}

#[test]
fn an_interrupted_run_leaves_a_page_and_lets_programs_and_their_children_clean_up() {
    let stage = Stage::new(&[
        ("good", "echo '{}' > \"$file\""),
        (
            "cleans",
            // Both have their traps before the run is interrupted.
            "trap 'touch cleaned; exit 1' TERM\n\
             sh -c 'trap \"sleep 1; touch child-cleaned; exit 1\" TERM; touch begun; \
             while :; do sleep 0.1; done' &\n\
             while :; do sleep 0.1; done",
        ),
    ]);
    let stop = AtomicBool::new(false);
    let steps = [step("codec", "good"), step("pool", "cleans"), step("hop", "good")];
    let record = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stage.path("begun").exists() {
                std::thread::sleep(Duration::from_millis(10));
            }
            stop.store(true, Ordering::Relaxed);
        });
        stage.run(&steps, 300, &stop)
    });
    assert!(record.interrupted && !record.complete);
    let states: Vec<State> = record.steps.iter().map(|step| step.state).collect();
    assert_eq!(states, [State::Done, State::Interrupted]);
    assert!(stage.path("cleaned").exists() && stage.path("child-cleaned").exists());
    same_on_disk(&stage, &record);
    assert!(stage.page().contains("The run was interrupted"));
    assert!(!stage.path("out/data/pool.part").exists());
}

#[test]
fn the_page_is_there_whole_after_each_step() {
    let stage = Stage::new(&[
        ("first", "echo '{}' > \"$file\""),
        // The page of the first step, as a reader sees it meanwhile.
        (
            "second",
            "cp out/index.html seen.html; cp out/data/run.json seen.json; echo '{}' > \"$file\"",
        ),
    ]);
    stage.run(&[step("codec", "first"), step("pool", "second")], 300, &AtomicBool::new(false));
    let seen = fs::read_to_string(stage.path("seen.html")).unwrap();
    assert!(seen.ends_with("</html>") && seen.contains(", not complete"));
    let record: Value =
        serde_json::from_slice(&fs::read(stage.path("seen.json")).unwrap()).unwrap();
    assert_eq!(record["steps"].as_array().unwrap().len(), 1);
    assert!(!stage.page().contains(", not complete"));
}

/// Regression: a run removed the files of its own steps only. After a full run, a quick one or one
/// of a single step showed the others' old samples under its own commit and machine, without a
/// warning of their load, and `scripts/report --commit` would have published them. Predictions were
/// copied from target/bench, whatever their age.
#[test]
fn no_samples_of_an_earlier_run_or_another_benchmark_are_shown() {
    let stage = Stage::new(&[("good", "echo '{\"hop\": []}' > \"$file\""), ("silent", "exit 1")]);
    let points = r#"{"points": [{"method": "platen", "link": 200, "pages": "guest", "load": {"rate": 1},
        "predicted": {"verdict": "converges", "total-time": 1500}, "measured": {"total-time": 1500}}]}"#;
    for folder in ["out/data", "bench"] {
        fs::create_dir_all(stage.path(folder)).unwrap();
        fs::write(stage.path(folder).join("advise.json"), points).unwrap();
    }
    fs::write(stage.path("out/data/redis.json"), "{\"memory_mib\": 4096}").unwrap();
    // A file that a program was writing when an earlier run was killed.
    fs::write(stage.path("out/data/pool.part"), "{\"old\": 1}").unwrap();
    let record =
        stage.run(&[step("hop", "good"), step("pool", "silent")], 300, &AtomicBool::new(false));
    assert!(!record.steps[1].why.contains("its figures"), "{record:?}");
    let mut files: Vec<_> =
        fs::read_dir(stage.path("out/data")).unwrap().flatten().map(|e| e.file_name()).collect();
    files.sort();
    assert_eq!(files, ["hop.json", "run.json"]);
    let page = stage.page();
    assert!(page.contains("advise.json is not there"), "{page}");
    assert!(page.contains("redis.json is not there"), "{page}");
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_that_names_it() {
    let stage = Stage::new(&[]);
    fs::write(stage.path("out"), "a file").unwrap();
    let places = Places {
        out: stage.path("out"),
        programs: stage.path("."),
        target: Path::new("target").to_owned(),
    };
    let failed = all(&places, &[], 1, Record::default(), &AtomicBool::new(false)).unwrap_err();
    assert!(format!("{failed:#}").contains("out/data"), "{failed:#}");
}
