//! The promises of the corpus, on synthetic data and on the files if they are available.

use std::collections::HashSet;

use codec::{Encoder, Settings};
use corpus::{is_same_filled, Corpus, Origin, Rounds, PAGE};

/// Bytes in over bytes out, zstd level 1 in batches of 128 pages.
fn ratio(pages: &[u8]) -> f64 {
    let mut encoder = Encoder::new(Settings::default()).unwrap();
    let mut out = vec![0; 128 * PAGE];
    let packed: usize =
        pages.chunks(128 * PAGE).map(|batch| encoder.encode(batch, &mut out).len).sum();
    pages.len() as f64 / packed as f64
}

fn check(corpus: &Corpus, ratios: std::ops::Range<f64>) {
    for name in ["guest", "redis", "text", "code", "random"] {
        assert!(corpus.names().contains(&name), "no {name} in {:?}", corpus.names());
    }
    let mut sum = 0;
    for name in corpus.names() {
        let set = corpus.set(name).unwrap();
        assert_eq!(set.name(), name);
        assert!(!set.pages().is_empty() && set.pages().len() % PAGE == 0, "{name}");
        println!("{name}: {} pages, ratio {:.2}", set.pages().len() / PAGE, ratio(set.pages()));
        sum += set.pages().len();
    }
    assert!(corpus.set("nothing of the kind").is_none());
    assert!(ratio(corpus.set("random").unwrap().pages()) <= 1.0);

    let unique = corpus.mixed_unique();
    assert!(unique.len() <= sum && unique.len() >= 32 << 20);
    let mut seen = HashSet::new();
    for page in unique.chunks_exact(PAGE) {
        assert!(!is_same_filled(page));
        assert!(seen.insert(page), "a page twice");
    }
    let plain = ratio(&unique);
    assert!(ratios.contains(&plain), "ratio {plain:.3} is unlike memory");
    println!("mixed: {} MiB, ratio {plain:.3}", unique.len() >> 20);

    // Two more rounds: none of the same pages, and the same ratio.
    let rounds = Rounds::new(unique.clone());
    let mut next = vec![0; unique.len()];
    for round in 0..2 {
        rounds.read_at(round * unique.len(), &mut next);
        assert!(next.chunks_exact(PAGE).all(|page| !seen.contains(page)), "round {round}");
        let renamed = ratio(&next);
        assert!(
            (renamed / plain - 1.0).abs() < 0.01,
            "round {round}: {renamed:.3}, not {plain:.3}"
        );
    }
}

#[test]
fn generated_data_resembles_memory_and_is_deterministic() {
    let corpus = Corpus::made("for this test");
    assert_eq!(corpus.origin().to_string(), "made data (for this test)");
    check(&corpus, 2.5..2.7);
    let sums = [0, 1].map(|_| codec::checksum(&corpus.mixed_unique()));
    assert_eq!(sums[0], sums[1]);
    assert_eq!(sums[0], MADE, "the made data changed: figures taken on it no longer compare");
}

#[test]
fn the_corpus_files_compress_as_expected() {
    let corpus = Corpus::load();
    if let Origin::Made(why) = corpus.origin() {
        println!("skipped: {why}");
        return;
    }
    check(&corpus, 2.6..3.0);
}

#[test]
fn a_file_is_written_as_it_reads() {
    let rounds = Rounds::new(Corpus::made("for this test").text().into_pages());
    let len = rounds.round_len() + 12_345;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pages");
    rounds.write_to(&path, len as u64).unwrap();
    assert!(std::fs::read(&path).unwrap() == rounds.bytes(len));
}

/// Checksum of `mixed_unique` of the made data.
const MADE: u64 = 1_897_341_248_244_967_549;
