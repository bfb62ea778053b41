use super::*;
use crate::script::Script;

fn faults(text: &str) -> Faults {
    Faults::new(Script::parse(text).expect("the script is good").rules())
}

fn submit(faults: &Faults, instance: usize, direction: Direction) -> Verdict {
    faults.submission(instance, direction, 0, &mut Vec::new())
}

fn effects(faults: &Faults, count: usize) -> Vec<Effect> {
    let effect = |_| match submit(faults, 0, Direction::Compress) {
        Verdict::Accept { effect, .. } => effect,
        other => panic!("{other:?}"),
    };
    (0..count).map(effect).collect()
}

#[test]
fn at_affects_the_stated_number_of_submissions() {
    let faults = faults("at 2 error -9 2");
    let (none, error) = (Effect::None, Effect::Error(-9));
    assert_eq!(effects(&faults, 5), [none, error, error, none, none]);
}

#[test]
fn every_affects_each_nth_submission() {
    let faults = faults("every 3 flip");
    let (none, flip) = (Effect::None, Effect::Flip);
    assert_eq!(effects(&faults, 7), [none, none, flip, none, none, flip, none]);
}

#[test]
fn filters_count_only_what_they_match() {
    let faults = faults("at 2 instance=1 op=decompress fail");
    let refused = Verdict::Refuse(CPA_STATUS_FAIL);
    assert_ne!(submit(&faults, 1, Direction::Decompress), refused);
    assert_ne!(submit(&faults, 0, Direction::Decompress), refused);
    assert_ne!(submit(&faults, 1, Direction::Compress), refused);
    assert_eq!(submit(&faults, 1, Direction::Decompress), refused);
    assert_ne!(submit(&faults, 1, Direction::Decompress), refused);
}

#[test]
fn an_effect_given_back_affects_the_next_submission() {
    let faults = faults("at 1 crc");
    let Verdict::Accept { effect: Effect::Crc, rule } = submit(&faults, 0, Direction::Compress)
    else {
        panic!("no effect")
    };
    faults.give_back(rule);
    assert_eq!(effects(&faults, 2), [Effect::Crc, Effect::None]);
}

#[test]
fn time_and_polls() {
    let faults = faults("after 5 silence\nnow pollfail 2");
    let mut deeds = Vec::new();
    assert_eq!(faults.poll(0, 0, &mut deeds), Some(Broken::Fails));
    faults.tick(10_000_000, &mut deeds);
    assert_eq!(deeds, [], "time runs from the first submission");
    faults.submission(0, Direction::Compress, 10_000_000, &mut deeds);
    faults.tick(14_999_999, &mut deeds);
    assert_eq!(deeds, []);
    assert_eq!(faults.poll(3, 15_000_000, &mut deeds), Some(Broken::Fails));
    assert_eq!(deeds, [Deed { instance: None, action: Action::Silence }]);
    assert_eq!(faults.poll(0, 16_000_000, &mut deeds), None);
    assert_eq!(deeds.len(), 1);
}

#[test]
fn calls_of_one_function_hang_and_no_others() {
    let faults = faults("now instance=1 block start; at 1 block poll; at 2 spin submit");
    let mut deeds = Vec::new();
    faults.tick(0, &mut deeds);
    assert_eq!(deeds, []);
    assert_eq!(
        [0, 1, 1].map(|instance| faults.hangs(Entry::Start, instance)),
        [None, Some(Stuck::Sleeps), None]
    );
    assert_eq!(faults.hangs(Entry::Stop, 1), None);
    assert_eq!(faults.poll(0, 0, &mut deeds), None);
    assert_eq!(effects(&faults, 1), [Effect::None]);
    assert_eq!(submit(&faults, 0, Direction::Compress), Verdict::Hang(Stuck::Spins));
    assert_eq!(effects(&faults, 1), [Effect::None]);
    assert_eq!(faults.poll(0, 0, &mut deeds), Some(Broken::Hangs(Stuck::Sleeps)));
    assert_eq!(faults.poll(0, 0, &mut deeds), None);
}
