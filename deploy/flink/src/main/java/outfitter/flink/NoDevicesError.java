package outfitter.flink;

/**
 * The task manager has no devices. It is an Error, because Flink logs an Exception of a driver as a warning and then
 * advertises the amount all the same; only an Error ends the start of the task manager.
 */
public final class NoDevicesError extends Error {

    private static final long serialVersionUID = 1L;

    NoDevicesError(String message, Throwable cause) {
        super(message, cause);
    }
}
