//! Several players that share decoded units.

use super::*;
use player::UnitCache;
use std::sync::mpsc::channel;

type Acts = Box<dyn FnOnce(&mut Destination) + Send>;

/// Plays an image to each of these destinations at once.
fn play_all(
    cache: &Arc<UnitCache>,
    destinations: Vec<Acts>,
) -> Vec<(Result<Played, PlayError>, Destination)> {
    let start = |destination: Acts| {
        let (here, there) = UnixStream::pair().unwrap();
        let cache = Arc::clone(cache);
        let player = thread::spawn(move || Player::sharing(&cache, None)?.play(here, &mut |_| {}));
        let end = thread::spawn(move || {
            let mut end = Destination::new(there);
            destination(&mut end);
            let _ = end.stream.shutdown(std::net::Shutdown::Both);
            end
        });
        (player, end)
    };
    let threads: Vec<_> = destinations.into_iter().map(start).collect();
    let join = |(player, end): (thread::JoinHandle<_>, thread::JoinHandle<_>)| {
        (player.join().unwrap(), end.join().unwrap())
    };
    threads.into_iter().map(join).collect()
}

#[test]
fn each_unit_is_decoded_once_for_all_players() {
    let folder = tempfile::tempdir().unwrap();
    let (image, pages) = made(&folder.path().join("i"));
    let units = image.index().units.len() as u64;
    let cache = UnitCache::new(&image, 2, 64 << 20).unwrap();
    let ends = (0..4).map(|_| Box::new(to_the_end) as Acts);
    for (played, end) in play_all(&cache, ends.collect()) {
        played.unwrap();
        end.compare(&pages);
    }
    let decoded = cache.decoded();
    // A unit with superseded pages only is not needed.
    assert!(units / 2 < decoded.units && decoded.units <= units, "{decoded:?} of {units}");
    assert!(decoded.bytes <= units * (64 << 10), "{decoded:?}");
}

/// The cache holds a part of the image: what the stopped destination lacks is decoded again.
#[test]
fn a_destination_that_stops_delays_no_other_and_gets_every_page_later() {
    let folder = tempfile::tempdir().unwrap();
    let (image, pages) = made(&folder.path().join("i"));
    let cache = UnitCache::new(&image, 1, 0).unwrap();
    let (done, others) = channel();
    let stops = move |end: &mut Destination| {
        while !end.running {
            end.element();
        }
        // Until both others have everything.
        for _ in 0..2 {
            others.recv_timeout(LONG).unwrap();
        }
        to_the_end(end);
    };
    let goes = |done: std::sync::mpsc::Sender<()>| {
        move |end: &mut Destination| {
            to_the_end(end);
            done.send(()).unwrap();
        }
    };
    let ends: Vec<Acts> = vec![Box::new(stops), Box::new(goes(done.clone())), Box::new(goes(done))];
    for (played, end) in play_all(&cache, ends) {
        played.unwrap();
        end.compare(&pages);
    }
}

#[test]
fn a_damaged_unit_ends_all_players_that_need_it_and_a_sound_one_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("i");
    let (image, _) = made(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let last = image.index().units.last().unwrap();
    file.write_all_at(&[0x5a; 8], last.offset + 30).unwrap();
    let cache = UnitCache::new(&image, 2, 64 << 20).unwrap();
    // Read until the player ends.
    let reads = |end: &mut Destination| {
        while !end.running {
            end.element();
        }
        let _ = std::io::copy(&mut end.stream, &mut std::io::sink());
    };
    let ends = (0..3).map(|_| Box::new(reads) as Acts);
    let named = format!("unit {}", image.index().units.len() - 1);
    for (played, _) in play_all(&cache, ends.collect()) {
        let error = played.unwrap_err();
        assert!(matches!(error, PlayError::Image(_)), "{error}");
        assert!(error.to_string().contains(&named), "{error}");
    }
}
