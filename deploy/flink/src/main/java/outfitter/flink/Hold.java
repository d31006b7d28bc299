package outfitter.flink;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.List;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Consumer;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * The child process {@code outfitter hold}, which registers, sends heartbeats and gives the devices back. If it dies, it
 * is started again under the same name and run, which loses nothing: the manager watches this JVM, not the child.
 */
final class Hold {

    private static final Logger LOG = LoggerFactory.getLogger(Hold.class);
    /** The exit code of {@code outfitter hold} after an allocation that ended before its owner did. */
    private static final int LOST = 123;

    /** What starting the child and asking the manager may take beyond {@code param.wait}. */
    private static final Duration STARTING = Duration.ofSeconds(30);

    private static final Duration STOPPED_WITHIN = Duration.ofSeconds(5);
    private static final Duration SHORTEST_PAUSE = Duration.ofMillis(200);
    private static final Duration LONGEST_PAUSE = Duration.ofSeconds(10);

    private final List<String> command;
    private final Settings settings;
    private final Consumer<String> lost;
    private final CompletableFuture<Set<DeviceInfo>> granted = new CompletableFuture<>();
    private volatile Process process;
    private volatile boolean closing;
    /** The last line of the child that runs, or has ended last. */
    private Line last;

    /**
     * @param lost called once, with the reason, if the allocation ends while this JVM lives
     */
    Hold(Settings settings, long amount, Consumer<String> lost) {
        ProcessHandle self = ProcessHandle.current();
        String started = self.info().startInstant().map(at -> Long.toString(at.toEpochMilli(), 36)).orElse("0");
        String random = UUID.randomUUID().toString();
        // a pid alone is not unique: in containers every task manager may have the same one
        String worker = "taskmanager-" + self.pid() + "-" + started + "-" + random.substring(0, 8);
        this.settings = settings;
        this.command = settings.hold(amount, self.pid(), worker, random);
        this.lost = lost;
    }

    /**
     * Start the child and wait for the devices.
     *
     * @throws NoDevicesException there are none; the message is Outfitter's own
     */
    Set<DeviceInfo> start() throws NoDevicesException {
        try {
            launch();
        } catch (IOException error) {
            throw new NoDevicesException("cannot start " + command.get(0) + ": " + error.getMessage());
        }
        // not close(): tasks may compute until the JVM ends, whose end gives the devices back
        Runtime.getRuntime().addShutdownHook(new Thread(() -> closing = true, "outfitter-closing"));
        Thread follower = new Thread(this::follow, "outfitter-hold");
        follower.setDaemon(true);
        follower.start();
        Duration patience = settings.wait.plus(STARTING);
        try {
            return granted.get(patience.toMillis(), TimeUnit.MILLISECONDS);
        } catch (ExecutionException error) {
            throw new NoDevicesException(error.getCause().getMessage());
        } catch (TimeoutException error) {
            throw new NoDevicesException("no answer from outfitter hold within " + patience.toSeconds() + " s");
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new NoDevicesException("interrupted while waiting for devices");
        }
    }

    /** Give the devices back: the end of its standard input tells the child so. */
    void close() {
        Process child;
        synchronized (this) { // a child that is just being started must not be missed
            closing = true;
            child = process;
        }
        if (child == null) {
            return;
        }
        try {
            child.getOutputStream().close();
            if (!child.waitFor(STOPPED_WITHIN.toMillis(), TimeUnit.MILLISECONDS)) {
                child.destroyForcibly();
            }
        } catch (IOException error) {
            LOG.debug("outfitter hold has ended already", error);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    /** Start the child, unless this JVM ends. */
    private synchronized void launch() throws IOException {
        if (closing) {
            return;
        }
        Process child = new ProcessBuilder(command).start();
        process = child;
        Thread words = new Thread(() -> log(child), "outfitter-hold-log");
        words.setDaemon(true);
        words.start();
    }

    private static void log(Process child) {
        try (BufferedReader reader = reader(child.getErrorStream())) {
            for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                LOG.info("{}", line);
            }
        } catch (IOException error) {
            LOG.debug("outfitter hold says nothing more", error);
        }
    }

    /** Read the child's lines, and start it again when it has died. */
    private void follow() {
        Duration pause = SHORTEST_PAUSE;
        while (true) {
            long begun = System.nanoTime();
            int code = readUntilEnd();
            if (System.nanoTime() - begun > LONGEST_PAUSE.toNanos()) {
                pause = SHORTEST_PAUSE;
            }
            if (closing) {
                return;
            }
            if (!granted.isDone()) {
                granted.completeExceptionally(new NoDevicesException(reason(code)));
                return;
            }
            if (granted.isCompletedExceptionally()) {
                return;
            }
            if (code == LOST) {
                lost.accept(reason(code));
                return;
            }
            LOG.warn("outfitter hold has ended ({}), starting it again: {}", code, reason(code));
            pause = restart(pause);
            if (pause == null) {
                return;
            }
        }
    }

    /** Start the child again. Returns the pause before the next time, or null if this JVM ends. */
    private Duration restart(Duration pause) {
        try {
            Thread.sleep(pause.toMillis());
            launch();
        } catch (IOException error) {
            LOG.warn("cannot start outfitter hold: {}", error.getMessage());
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            return null;
        }
        Duration longer = pause.multipliedBy(2);
        return longer.compareTo(LONGEST_PAUSE) > 0 ? LONGEST_PAUSE : longer;
    }

    private int readUntilEnd() {
        Process child = process;
        last = null;
        try (BufferedReader reader = reader(child.getInputStream())) {
            for (String text = reader.readLine(); text != null; text = reader.readLine()) {
                last = Line.parse(text);
                if (last.isGrant()) {
                    granted.complete(last.devices(settings.resource));
                } else if (last.isWarning()) {
                    LOG.warn("{}", last.reason());
                }
            }
            return child.waitFor();
        } catch (IOException error) {
            LOG.debug("outfitter hold says nothing more", error);
            return 125;
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            return 125;
        }
    }

    private String reason(int code) {
        String reason = last == null ? "" : last.reason();
        return reason.isEmpty() ? "outfitter hold ended with exit code " + code : reason;
    }

    private static BufferedReader reader(InputStream stream) {
        return new BufferedReader(new InputStreamReader(stream, StandardCharsets.UTF_8));
    }
}
