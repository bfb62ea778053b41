//! QEMU's threads before the pool: a model of its `compress` in C, with its locks.
//!
//! Each thread can have one pending request, under the thread's lock and condition. A finished
//! thread reports itself under one lock and condition that all share. The main thread holds that
//! lock while it looks for a finished thread; from that thread it fetches the result of the
//! previous page, and gives it the next page. Other results stay with their thread until the flush
//! at the end.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use codec::{Decoder, Settings};
use pages::PAGE_SIZE;

use super::link::Link;
use super::measure::{payload, thread_cpu, Compressor, Run, Watch};
use super::units::{Dest, Unit};

/// `CompressParam` and `DecompressParam`: the state that the main thread and one worker share.
struct Param<Q, R> {
    request: Mutex<Request<Q>>,
    wanted: Condvar,
    /// QEMU accesses the result without a lock, since `done` says which thread owns it. Safe Rust
    /// needs a lock here; it is never contended, so it costs some 20 ns a page and no system call.
    result: Mutex<R>,
}

struct Request<Q> {
    pending: Option<Q>,
    quit: bool,
}

/// All threads of one direction, with the global done lock.
struct Threads<Q, R> {
    params: Vec<Param<Q, R>>,
    done: Mutex<Vec<bool>>,
    one_done: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no thread panics with a lock")
}

impl<Q, R> Threads<Q, R> {
    fn new(count: usize, result: impl Fn() -> R) -> Self {
        let param = || Param {
            request: Mutex::new(Request { pending: None, quit: false }),
            wanted: Condvar::new(),
            result: Mutex::new(result()),
        };
        Self {
            params: (0..count).map(|_| param()).collect(),
            done: Mutex::new(vec![true; count]),
            one_done: Condvar::new(),
        }
    }

    /// `do_data_compress`, `do_data_decompress`: the main loop of a thread. Returns its CPU time.
    fn work(&self, number: usize, mut run: impl FnMut(Q, &mut R)) -> Duration {
        let param = &self.params[number];
        let mut request = lock(&param.request);
        while !request.quit {
            if let Some(next) = request.pending.take() {
                drop(request);
                run(next, &mut lock(&param.result));
                let mut done = lock(&self.done);
                done[number] = true;
                self.one_done.notify_one();
                drop(done);
                request = lock(&param.request);
            } else {
                request = param.wanted.wait(request).expect("no thread panics with a lock");
            }
        }
        drop(request);
        thread_cpu()
    }

    /// `compress_page_with_multi_thread`, `decompress_data_with_multi_threads`: looks for a
    /// finished thread, and lets `hand_over` fetch its last result and make the next request.
    /// `false` when there is none and `wait` is not set.
    fn submit(&self, wait: bool, hand_over: impl FnOnce(&mut R) -> Q) -> bool {
        let mut done = lock(&self.done);
        loop {
            if let Some(number) = done.iter().position(|&done| done) {
                let param = &self.params[number];
                let mut request = lock(&param.request);
                done[number] = false;
                request.pending = Some(hand_over(&mut lock(&param.result)));
                param.wanted.notify_one();
                return true;
            }
            if !wait {
                return false;
            }
            done = self.one_done.wait(done).expect("no thread panics with a lock");
        }
    }

    /// `flush_compressed_data`, `wait_for_decompress_done`: fetches every thread's remaining
    /// result.
    fn flush(&self, mut fetch: impl FnMut(&mut R)) {
        let all = |done: &mut Vec<bool>| done.iter().any(|&done| !done);
        drop(self.one_done.wait_while(lock(&self.done), all));
        self.params.iter().for_each(|param| fetch(&mut lock(&param.result)));
    }

    fn quit(&self) {
        for param in &self.params {
            lock(&param.request).quit = true;
            param.wanted.notify_one();
        }
    }
}

/// A page and its compressed form, while its thread has them.
struct Compressed {
    done: Option<(&'static [u8], codec::Encoded)>,
    out: Vec<u8>,
}

impl Compressed {
    /// `send_queued_data`.
    fn send(&mut self, link: &mut Link) {
        if let Some((plain, unit)) = self.done.take() {
            link.send(payload(unit, plain, &self.out));
        }
    }
}

pub(super) fn compress(
    pages: &'static [u8],
    threads: usize,
    wait: bool,
    settings: Settings,
    gbit: f64,
) -> Run {
    let shared = Threads::new(threads, || Compressed { done: None, out: vec![0; PAGE_SIZE] });
    let mut run = Run::default();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let shared = &shared;
                scope.spawn(move || {
                    let mut compressor = Compressor::copying(settings, PAGE_SIZE);
                    shared.work(number, |plain: &'static [u8], result: &mut Compressed| {
                        result.done = Some((plain, compressor.encode(plain, &mut result.out)));
                    })
                })
            })
            .collect();
        let mut link = Link::new(gbit);
        let watch = Watch::start();
        for plain in pages.chunks(PAGE_SIZE) {
            run.pages += 1;
            let queued = shared.submit(wait, |result| {
                result.send(&mut link);
                plain
            });
            if queued {
                run.jobs += 1;
            } else {
                run.busy += 1;
                link.send(plain);
            }
        }
        shared.flush(|result| result.send(&mut link));
        run.sent = link.finish();
        (run.wall, run.submitter) = watch.stop();
        shared.quit();
        run.workers = workers.into_iter().map(|worker| worker.join().expect("no panic")).collect();
    });
    run
}

/// A unit in the thread's own buffer, and the destination of its page.
struct Incoming {
    buffer: Vec<u8>,
    page: Option<&'static mut [u8]>,
    index: usize,
}

pub(super) fn decompress(units: &[Unit], dest: &mut Dest, threads: usize) -> anyhow::Result<Run> {
    let shared =
        Threads::new(threads, || Incoming { buffer: vec![0; PAGE_SIZE], page: None, index: 0 });
    let mut run = Run::default();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let shared = &shared;
                scope.spawn(move || {
                    let mut decoder = Decoder::new();
                    shared.work(number, |header: codec::UnitHeader, to: &mut Incoming| {
                        let page = to.page.as_deref_mut().expect("handed over with the request");
                        let payload = &to.buffer[..header.payload_len as usize];
                        decoder.decode(&header, payload, page).expect("made by the encoder");
                    })
                })
            })
            .collect();
        let watch = Watch::start();
        for (index, unit) in units.iter().enumerate() {
            run.pages += 1;
            run.jobs += 1;
            shared.submit(true, |to| {
                dest.put_back(to.index, to.page.take());
                to.index = index;
                to.page = Some(dest.take(index));
                // `qemu_get_buffer`.
                to.buffer[..unit.payload.len()].copy_from_slice(&unit.payload);
                unit.header
            });
        }
        shared.flush(|to| dest.put_back(to.index, to.page.take()));
        (run.wall, run.submitter) = watch.stop();
        shared.quit();
        run.workers = workers.into_iter().map(|worker| worker.join().expect("no panic")).collect();
    });
    dest.check()?;
    Ok(run)
}
