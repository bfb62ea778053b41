//! Speed of the tokeniser and of packing, and the cost of the structure, by kind of stream.
//!
//! `cargo bench -p stream`. One thread; best of several rounds, in GB of plain bytes a second.

use std::hint::black_box;
use std::time::Instant;

use stream::synth::{main_stream, multifd_streams, Style};
use stream::{pack, unpack, Kind, Token, Tokeniser};

const PAGE: usize = 4096;
const CHUNK: usize = 512 * 1024;
const ROUNDS: usize = 7;

fn main() {
    let noise = |n: usize| {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        (0..n).map(move |_| {
            let word = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            };
            std::iter::repeat_with(word).take(PAGE / 8).flatten().collect::<Vec<u8>>()
        })
    };
    let zeros = |n| std::iter::repeat_n(vec![0; PAGE], n);
    let scattered =
        |n: usize| (0..n).flat_map(move |i| [vec![0; PAGE], vec![i.to_le_bytes()[0]; PAGE]]);
    let lane = |style, pages: Vec<Vec<u8>>| multifd_streams(style, PAGE, 1, pages).1.remove(0);

    println!("{:34} {:>8} {:>8} {:>8}  {:>12}", "GB/s", "feed", "pack", "unpack", "structure");
    let page_main = main_stream(Style::Qemu92, PAGE, noise(16384));
    row("main, 64 MiB of pages", Kind::Main, &page_main, 16384);
    row(
        "main, zero records",
        Kind::Main,
        &main_stream(Style::Qemu72, PAGE, zeros(1 << 20)),
        1 << 20,
    );
    row(
        "main, zero/same-filled by turns",
        Kind::Main,
        &main_stream(Style::Qemu72, PAGE, scattered(8192)),
        16384,
    );
    row("multifd, pages", Kind::Multifd, &lane(Style::Qemu92, noise(16384).collect()), 16384);
    row(
        "multifd, zero pages",
        Kind::Multifd,
        &lane(Style::Qemu92, zeros(1 << 20).collect()),
        1 << 20,
    );
    let half = noise(8192).zip(zeros(8192)).flat_map(|(a, b)| [a, b]);
    row(
        "multifd, every other page zero",
        Kind::Multifd,
        &lane(Style::Qemu90, half.collect()),
        16384,
    );
    row("opaque", Kind::Other, &page_main, 0);
}

fn row(name: &str, kind: Kind, bytes: &[u8], pages: usize) {
    let mut best = [f64::MAX; 3];
    let mut tokens: Vec<Token> = Vec::with_capacity(CHUNK);
    let mut packed = vec![0; CHUNK + 4096];
    let mut plain = vec![0; CHUNK];
    let mut structure = 0;
    for _ in 0..ROUNDS {
        let mut spent = [0.0; 3];
        let mut tokeniser = Tokeniser::new(kind, PAGE);
        structure = 0;
        for piece in bytes.chunks(CHUNK) {
            let mut time = |slot: usize, work: &mut dyn FnMut()| {
                let start = Instant::now();
                work();
                spent[slot] += start.elapsed().as_secs_f64();
            };
            tokens.clear();
            time(0, &mut || tokeniser.feed(black_box(piece), &mut tokens));
            let mut len = 0;
            time(1, &mut || len = pack(piece, &tokens, PAGE, &mut packed).expect("room"));
            let plain = &mut plain[..piece.len()];
            time(2, &mut || unpack(black_box(&packed[..len]), plain).expect("packed"));
            assert!(plain == piece, "identical");
            structure += 12 + u32::from_be_bytes(packed[4..8].try_into().expect("4")) as usize;
        }
        for (best, spent) in best.iter_mut().zip(spent) {
            *best = best.min(spent);
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "figures to print")]
    let speed = |seconds: f64| bytes.len() as f64 / seconds / 1e9;
    #[allow(clippy::cast_precision_loss, reason = "figures to print")]
    let each = structure as f64 / pages.max(1) as f64;
    let [feed, pack, unpack] = best.map(speed);
    println!("{name:34} {feed:8.1} {pack:8.2} {unpack:8.2}  {each:7.4} B/page");
}
