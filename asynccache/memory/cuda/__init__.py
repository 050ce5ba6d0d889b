"""The CUDA device: streams and events as awaitables, and copies that keep the bus busy.

cupy is imported only when a device is opened or looked for, and by two modules: ``cupy_driver``, and ``kernels``,
which needs cupy's compiler. Everything else calls ``cupy_driver.CupyDriver``, so it also runs against a subclass that
simulates a GPU, on a machine without one.

```
 loop             submitter, a thread per stream       the device                      waiter, a thread per stream
 copy, record ──► queue ──► merge, choose, submit ───► stream: copies, event ───────►  synchronizes the head of its FIFO
 await event ◄───────────────────────────────── one hop per burst ◄──────────────────  fires it and all that are done
```
"""
